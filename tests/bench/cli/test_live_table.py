"""The live table of a sweep in a narrow terminal."""

from __future__ import annotations

import io
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.cli.terminal import progress
from fsdpbench.cli.terminal.progress import LiveProgress
from fsdpbench.launch.pool import PointState
from fsdpbench.reports.result import Result
from fsdpbench.sweep.planning import without_absent

RESULT = Result.of(
    {
        "status": "ok",
        "device": "sim",
        "step_time_s": 1.6258,
        "tokens_per_s_per_gpu": 10_077.0,
        "overlap_fraction": 0.4,
    }
)


def config(batch: int) -> Config:
    made = Config(
        model="gpt-2.8b", shape={}, system="impl-fsdp2", device="sim", hardware="a100-80gb", gpus=8,
        gpus_per_node=8, measurement=Measurement.default_for("sim"),
        settings=Settings.of(batch=batch, backward_prefetch="none", activation_checkpointing="full"),
    )  # fmt: skip
    return without_absent(made)


def test_rows_can_be_told_apart_at_eighty_columns() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    progress = LiveProgress(console)
    ended, running = [config(batch) for batch in (4, 8)], config(16)
    progress.begin(3, 0)
    try:
        for each in ended:
            progress.finished(each, RESULT)
        progress.started(running)
        with console.capture() as capture:
            console.print(progress._view())
    finally:
        progress.end()
    rows = [row for row in capture.get().splitlines() if ", batch " in row][-3:]
    names = [row.split("  ")[0] for row in rows]
    assert [name.split(", ")[1] for name in names] == ["batch 4", "batch 8", "batch 16"]
    assert all("1,625.8 ms a step" in row for row in rows[:2])


def test_a_long_run_says_how_far_it_is_and_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter((0.0, 0.0, 4.0, 11.0, 21.5, 32.0, 45.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    waiting = progress.WaitingProgress(600)
    waiting.begin(1, 0)
    for steps, waits in ((1, None), (1, None), (2, None), (2, "stands in x"), (2, "stands in x")):
        state = PointState(config(8), 3.0, f"{steps} of 7 steps", waits)
        waiting.tick(partial(list, [state]))
    assert capsys.readouterr().err.splitlines() == [
        "1 of 7 steps after 11 s, 3 s of them on processors (--timeout 600)",
        "2 of 7 steps after 32 s, 3 s of them on processors (--timeout 600); stands in x",
    ]
