"""The run folder: whole or not at all, refused when foreign, one sweep at a time."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpbench.answers.check.records.sides import stored_side
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.provenance import content_key, environment
from fsdpbench.engine.results.store import (
    INDEX_FILE,
    Store,
    StoredPoint,
    build_index,
    point_folder_name,
    refresh_index,
)
from fsdpbench.reports.result import Cause, Result, Status


def a_config(**settings: object) -> Config:
    return Config(
        model="gpt-tiny",
        shape={"layers": 2},
        system="impl-fsdp2",
        device="sim",
        hardware="a100-80gb",
        gpus=8,
        gpus_per_node=8,
        settings=Settings.of(**settings),
        measurement=Measurement.default_for("sim"),
    )


def finish(store: Store, config: Config, **figures: object) -> Path:
    work = store.work_folder(config)
    (work / "result.json").write_text(json.dumps({"status": "ok", **figures}))
    return store.commit(config, work)


def test_a_finished_configuration_is_found_by_its_key(tmp_path: Path) -> None:
    store, config = Store.open_or_create(tmp_path / "run"), a_config()
    store.write_space({"schema": 1}, [config])
    folder = finish(store, config, step_time_s=1.5)
    found = store.finished()[content_key(config)]
    assert found.folder == folder
    assert found.result.step_time_s == 1.5
    assert folder.name == point_folder_name(config)


def test_what_ran_with_other_settings_of_the_allocator_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated allocator reads them in the environment, as torch's does."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    config, store = a_config(), Store.open_or_create(tmp_path / "run")
    plain = content_key(config)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert content_key(config) != plain
    around = environment(config)
    assert around["variables"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    finish(store, config, step_time_s=1.5, environment=around)
    assert list(store.finished()) == [content_key(config)]
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert "variables" not in environment(config)
    assert list(store.finished()) not in ([], [plain])  # whole, but no result of this command
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    assert content_key(config) == plain


def test_a_link_to_nothing_in_a_configurations_place_gives_way(tmp_path: Path) -> None:
    store, config = Store.open_or_create(tmp_path / "run"), a_config()
    place = store.folder / point_folder_name(config)
    place.symlink_to(place.name)
    assert finish(store, config, step_time_s=1.5) == place
    assert not place.is_symlink()
    assert place.is_dir()
    assert len(list(store.folder.glob(".*old*"))) == 0


def test_work_in_progress_and_broken_folders_are_not_finished(tmp_path: Path) -> None:
    store, config = Store.open_or_create(tmp_path), a_config()
    store.write_space({"schema": 1}, [config])
    store.work_folder(config)
    broken = finish(store, a_config(batch=2))
    (broken / "result.json").write_text('{"status": "o')
    assert store.finished() == {}


def test_starting_again_clears_what_was_in_flight(tmp_path: Path) -> None:
    store, config = Store.open_or_create(tmp_path), a_config()
    store.write_space({"schema": 1}, [config])
    work = store.work_folder(config)
    with store.locked():
        assert not work.exists()


def test_a_foreign_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"no sweep\.toml"):
        Store.open_or_create(tmp_path)
    with pytest.raises(UsageError, match=r"not a sweep's folder"):
        Store.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        Store.open_or_create(file)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody can write to")
def test_an_unwritable_folder_is_named() -> None:
    with pytest.raises(BenchError, match="/proc/run"):
        Store.open_or_create(Path("/proc/run"))


def test_a_second_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    store = Store.open_or_create(tmp_path)
    with store.locked():
        with pytest.raises(UsageError, match=f"process {os.getpid()}"), store.locked():
            pass
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


def test_the_lock_of_a_dead_process_does_not_hold(tmp_path: Path) -> None:
    holder = (
        "import os, sys; from pathlib import Path; from fsdpbench.engine.results.store import Store\n"
        "store = Store.open_or_create(Path(sys.argv[1]))\n"
        "lock = store.locked(); lock.__enter__(); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", holder, str(tmp_path)], timeout=60)
    assert done.returncode == 9
    assert (tmp_path / ".lock").exists()
    with Store.open_or_create(tmp_path / "other").locked():
        pass
    (tmp_path / "sweep.toml").write_text("schema = 1\n")
    with Store.open_or_create(tmp_path).locked():
        pass


def test_the_index_is_made_from_the_folders(tmp_path: Path) -> None:
    store = Store.open_or_create(tmp_path)
    configs = [a_config(batch=batch) for batch in (1, 2)]
    store.write_space({"schema": 1}, configs)
    for config in configs:
        finish(store, config, step_time_s=0.5 * config.settings.batch, peak_memory_bytes={"reserved": 7})
    build_index(tmp_path / INDEX_FILE, store.points())
    with sqlite3.connect(tmp_path / INDEX_FILE) as connection:
        rows = connection.execute(
            "SELECT batch, step_time_s, peak_reserved_bytes FROM results ORDER BY batch"
        ).fetchall()
    assert rows == [(1, 0.5, 7), (2, 1.0, 7)]


def test_only_points_of_the_current_space_are_current(tmp_path: Path) -> None:
    store, old, new = Store.open_or_create(tmp_path), a_config(batch=1), a_config(batch=2)
    store.write_space({"schema": 1}, [old, new])
    finish(store, old, device="sim")
    finish(store, new, device="sim")
    store.write_space({"schema": 1}, [new])
    assert list(stored_side(tmp_path).entries) == [new.name]
    assert len(store.points()) == 2


def test_an_index_takes_what_a_database_cannot(tmp_path: Path) -> None:
    odd = {"status": "ok", "ooms": 2**70, "cause": {"message": "\udcff"}, "time_s": [1], "hfu": {"a": 1}}
    result = Result(status=Status.OK, cause=Cause("\udcff"), content=odd)
    build_index(tmp_path / INDEX_FILE, [StoredPoint(tmp_path, "key", {"settings": {"seed": 2**64}}, result)])
    with sqlite3.connect(tmp_path / INDEX_FILE) as connection:
        found = connection.execute("SELECT seed, ooms, cause, time_idle_s, hfu FROM results").fetchall()
    assert found == [(str(2**64), str(2**70), "\\udcff", None, '{"a": 1}')]


def test_an_index_that_cannot_be_made_is_told_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open_or_create(tmp_path)
    (tmp_path / INDEX_FILE).mkdir()
    refresh_index(store)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "results.sqlite: cannot be written (Is a directory); the results are in the folders" in told[0]


@pytest.mark.parametrize(
    "broken",
    [
        {}, {"status": "done"}, {"status": "ok", "config": {"model": "another"}},
        *({"status": "ok", "step_time_s": figure} for figure in (float("nan"), "1", -1.0)),
    ],
)  # fmt: skip
def test_what_cannot_be_a_result_runs_again(tmp_path: Path, broken: dict[str, object]) -> None:
    store = Store.open_or_create(tmp_path)
    folder = finish(store, a_config())
    assert len(store.points()) == 1
    (folder / "result.json").write_text(json.dumps(broken))
    assert store.points() == []


def test_a_second_command_may_come_while_the_first_makes_the_folder(tmp_path: Path) -> None:
    first = Store.open_or_create(tmp_path / "run")
    with first.locked():
        first.work_folder(a_config())
        Store.open_or_create(tmp_path / "run")
