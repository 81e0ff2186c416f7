"""The live table of a sweep in a narrow terminal."""

from __future__ import annotations

import io
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.cli.terminal import progress
from fsdpbench.cli.terminal.progress import LiveProgress, distinct_names, shortened
from fsdpbench.launch.used_time import PointState
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
    rows = [row for row in capture.get().splitlines() if row.startswith("…")]
    names = [row.split("  ")[0] for row in rows]
    assert len(set(names)) == 3, rows
    assert [name.strip("…") for name in names] == ["4", "8", "16"]
    assert all("1,625.8 ms a step" in row for row in rows[:2])


def test_names_are_cut_where_they_are_the_same() -> None:
    names = [
        f"impl-fsdp2-block-bwd-{prefetch}-bf16-batch-{batch}{end}"
        for prefetch in ("pre", "none")
        for batch in (4, 8)
        for end in ("", "-reducedtype-bf16")
    ]
    short = distinct_names(names, 36)
    assert short[0] == "…pre-bf16-batch-4"
    assert short[-1] == "…none-bf16-batch-8-reducedtype-bf16"
    assert distinct_names(names, 80) == names
    assert distinct_names(names[:1], 20) == [shortened(names[0], 20)]


@given(st.lists(st.text("ab-", min_size=1, max_size=30), min_size=1, max_size=5), st.integers(6, 20))
def test_no_name_is_longer_than_its_room(names: list[str], width: int) -> None:
    assert all(len(name) <= width for name in distinct_names(names, width))


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
