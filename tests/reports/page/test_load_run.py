"""Reading run folders: whole ones, broken ones, foreign ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from fsdpbench.reports.pages import RunFolderError, Status, load_run


@pytest.fixture
def run(synthetic: ModuleType, tmp_path: Path) -> Path:
    """Four configurations without traces, to be damaged."""
    return synthetic.write_sweep(tmp_path / "run", traces=False, limit=4)


def folders(run: Path) -> list[Path]:
    return sorted(path for path in run.iterdir() if path.is_dir())


def test_every_configuration_is_a_row_with_its_settings_and_figures(sweep: Path) -> None:
    view = load_run(sweep)
    assert len(view.configurations) == 30
    assert view.title == "gpt-2.8b-8x-a100-80gb"
    row = next(row for row in view.configurations if row.name == "impl-fsdp1-block-pre-bf16-2")
    assert row.status is Status.OK
    assert row.settings["backward_prefetch"] == "pre"
    assert row.settings["system"] == "impl-fsdp1"
    assert row.settings["gpus"] == 8
    assert row.result.step_time_s is not None
    assert row.simulated
    assert [path.name for path in row.traces] == ["rank0_trace.json.gz"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "result.json").unlink(), "result.json is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (
            lambda folder: (folder / "result.json").write_text('{"status": "ok", "step_'),
            "result.json (23 bytes)",
        ),
        (lambda folder: (folder / "result.json").write_text('{"status": 3}'), "Expected `str`, got `int`"),
        (
            lambda folder: (folder / "result.json").write_text('{"status": "great"}'),
            "enum value 'great' - at",
        ),
        (lambda folder: (folder / "result.json").write_text('{"status": "ok"}'), "step_time_s is missing"),
        (
            lambda folder: (folder / "result.json").write_text('{"status": "ok", "step_time_s": 0}'),
            "step_time_s is 0",
        ),
        (lambda folder: (folder / "result.json").write_text("[]"), "Expected `object`, got `array`"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json"),
    ],
)
def test_a_broken_folder_is_a_row_that_says_why(run: Path, damage: object, words: str) -> None:
    broken = folders(run)[1]
    damage(broken)  # type: ignore[operator]
    view = load_run(run)
    assert len(view.configurations) == 4
    (row,) = view.with_status(Status.UNREADABLE)
    assert row.folder == broken
    assert row.problem is not None
    assert words in row.problem
    assert len(view.with_status(Status.OK)) == 3


def test_a_cause_becomes_the_rows_problem(run: Path, synthetic: ModuleType) -> None:
    for folder, cause in zip(
        folders(run), ({"message": "no memory", "log": "x"}, "killed", {"line": "boom"}, None), strict=True
    ):
        result = synthetic.failed_result("error") | {"cause": cause}
        (folder / "result.json").write_text(json.dumps(result))
    assert [row.problem for row in load_run(run).configurations] == ["no memory", "killed", "boom", None]


def test_folders_of_an_earlier_sweep_are_left_out_and_missing_points_are_pending(run: Path) -> None:
    names = [folder.name for folder in folders(run)]
    (run / "sweep.toml").write_text(f"points = {json.dumps([*names[:2], 'later-00000099'])}\n")
    view = load_run(run)
    assert [row.folder.name for row in view.configurations] == names[:2]
    assert view.left_out == tuple(names[2:])
    assert view.pending == ("later-00000099",)


def test_work_in_progress_and_other_folders_are_not_rows(run: Path) -> None:
    (run / "sweep.toml").write_text("model = 'gpt-2.8b'\n")
    (run / ".work-impl-fsdp1-00000000").mkdir()
    (run / "notes").mkdir()
    assert len(load_run(run).configurations) == 4


def test_a_single_configurations_folder_is_a_run_of_one(run: Path) -> None:
    assert len(load_run(folders(run)[0]).configurations) == 1


def test_none_is_auto_where_another_row_of_the_system_sets_it_and_absent_otherwise(run: Path) -> None:
    for folder, seq in zip(folders(run), (None, 1024, None, None), strict=True):
        config = json.loads((folder / "config.json").read_text())
        config["settings"] |= {"seq": seq, "shard_size": None}
        config["system"] = "impl-fsdp1"
        (folder / "config.json").write_text(json.dumps(config))
    view = load_run(run)
    assert [row.settings["seq"] for row in view.configurations] == ["auto", 1024, "auto", "auto"]
    assert all("shard_size" not in row.settings for row in view.configurations)


def test_a_run_that_has_just_begun_is_empty_not_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('points = ["a-00000001"]\n')
    view = load_run(tmp_path)
    assert view.configurations == ()
    assert view.pending == ("a-00000001",)


def test_what_is_no_run_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "data.json").write_text("{}")
    (tmp_path / "foreign" / "looks-like-0123abcd").mkdir()
    (tmp_path / "foreign" / "a-model").mkdir()
    (tmp_path / "foreign" / "a-model" / "config.json").write_text("{}")
    for path, words in (
        ("none", "no such folder"),
        ("file", "is a file"),
        ("foreign", "is not a run folder"),
    ):
        with pytest.raises(RunFolderError, match=words) as caught:
            load_run(tmp_path / path)
        assert "\n" not in str(caught.value)
        assert path in str(caught.value)


def test_further_runs_of_a_configuration_are_no_rows(run: Path) -> None:
    shutil.copytree(folders(run)[0], run / f"{folders(run)[0].name}.run2")
    view = load_run(run)
    assert len(view.configurations) == 4
    assert view.left_out == ()
