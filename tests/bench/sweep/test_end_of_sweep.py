"""The end of a sweep for people: figures are never cut, failures are named, whatever the width."""

from __future__ import annotations

import contextlib
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.cli.terminal import ranking
from fsdpbench.engine.results.store import Store
from fsdpbench.sweep.planning import without_absent


def config(**settings: Any) -> Config:
    made = Config(
        model="gpt-tiny", shape={"layers": 2}, system="impl-fsdp1", device="cpu", hardware=None, gpus=2,
        gpus_per_node=2, settings=Settings.of(**settings), measurement=Measurement.default_for("cpu"),
    )  # fmt: skip
    return without_absent(made)


def finish(store: Store, made: Config, **result: Any) -> None:
    work = store.work_folder(made)
    content = {"schema": 1, "config": made.to_dict(), "device": made.device, "cause": None, **result}
    (work / "result.json").write_text(json.dumps(content))
    store.commit(made, work)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store.open_or_create(tmp_path / "run")
    made = [
        config(
            batch=batch, wrap=wrap, backward_prefetch=prefetch, limit_all_gathers=limit, reduce_dtype=dtype
        )
        for batch in (1, 16)
        for wrap, prefetch, limit, dtype in (("block", "pre", 2, "fp32"), ("every-4", "none", "off", "bf16"))
    ]
    store.write_space({"schema": 1}, made)
    for index, each in enumerate(made[:-1]):
        finish(
            store, each, status="ok", step_time_s=0.25 + index, tokens_per_s_per_gpu=123456.0 - index,
            samples_per_s_per_gpu=60.0 - index, overlap_fraction=0.375, measured={"spread": 0.0123},
            environment={"warnings": ["other work ran beside it: 1.5 of 2 cores were busy"][index:]},
        )  # fmt: skip
    cause = {"message": "rank 1: killed by SIGKILL", "log": "logs/rank1_stderr.log"}
    finish(store, made[-1], status="crash", cause=cause)
    return store.folder


def printed(folder: Path, width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    shown = StringIO()
    shown.isatty = lambda: terminal  # type: ignore[method-assign]
    for name, value in (("COLUMNS", str(width)), ("LINES", "50"), ("NO_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(shown):
        ranking.print_ranking(folder, ran=4, already_done=0)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())  # bold and dim are left of the styles


@pytest.mark.parametrize(("width", "terminal"), [(60, True), (80, True), (160, True), (80, False)])
def test_no_figure_is_cut_at_any_width(
    folder: Path, width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(folder, width, terminal, monkeypatch)
    for figure in ("123,456", "123,455", "123,454"):
        assert figure in text
    assert "…" not in text
    limit = width if terminal else 200
    table = text.split("1 failed:")[0]
    assert max(map(len, table.splitlines())) <= limit


def test_the_page_is_named_if_it_could_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(folder, 80, False, monkeypatch).endswith("4 configurations ran.\n")
    (folder / "report.html").touch()
    named = f"4 configurations ran. Report: {folder}/report.html\n"
    assert printed(folder, 80, False, monkeypatch).endswith(named)


def test_the_least_important_columns_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (printed(folder, width, True, monkeypatch) for width in (160, 80))
    assert {"step,", "spread", "overlap"} <= set(wide.split())
    assert {"tokens", "/s/rank"} <= set(narrow.split())
    assert "GPU" not in wide, "ranks on a CPU are no GPUs"
    assert "spread" not in narrow


def test_measured_rows_tell_their_spread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1.2 %" in printed(folder, 160, True, monkeypatch)


def test_simulated_rows_tell_their_interval_and_share_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open_or_create(tmp_path / "run")
    base = config()
    made = [
        Config.from_dict(
            {
                **base.to_dict(),
                "device": "sim",
                "hardware": "a100-80gb",
                "settings": Settings.of(batch=b).to_dict(),
            }
        )
        for b in (1, 2, 3)
    ]
    store.write_space({"schema": 1}, made)
    for each, tokens in zip(made, (100.0, 98.0, 50.0), strict=True):
        interval = {
            "level": 0.9, "step_time_s": [0.93, 1.07], "because": ["memory is nearly full"],
            "risky": tokens == 50, "runs": 9, "apart": 0.05,
        }  # fmt: skip
        finish(store, each, status="ok", step_time_s=1.0, tokens_per_s_per_gpu=tokens, interval=interval)
    text = printed(store.folder, 120, False, monkeypatch)
    assert [line.split()[0] for line in text.splitlines() if line[:2] in ("1=", " 3")] == ["1=", "1=", "3"]
    assert "100.0 tokens/s/GPU ±7 %" in text
    assert "Less is known here: memory is nearly full" in text
    assert "Ranks with = cannot be distinguished" in text
    assert "−2.0 ±4.8 %" in text, "nothing was traced: any two may differ by 5 %"
    assert "risky: memory fits only inside the prediction" in text


def test_doubtful_figures_are_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(folder, 160, True, monkeypatch)
    assert "Doubtful: 1 of 3 measured: other work ran beside it" in text


def test_failures_are_named_with_cause_and_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(printed(folder, 80, True, monkeypatch).split())
    assert "1 failed:" in text
    assert "rank 1: killed by SIGKILL" in text
    assert "logs/rank1_stderr.log" in text
    assert "--retry-failed" in text
