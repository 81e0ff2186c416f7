"""Systems side by side, scaling over GPU counts, predicted beside measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

from fsdpbench.reports.pages.comparisons import MOST_LINES, predicted_and_measured, scaling
from fsdpbench.reports.pages.ranking import TOKENS, Ranked, rank, varying_settings
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.pages.whole_run import Chart
from fsdpbench.reports.result import ConfigFile, Result
from fsdpbench.reports.result import Status as Ended


def row(
    tokens: float | None, system: str = "one", gpus: int = 8, device: str = "cuda", **settings: object
) -> Configuration:
    status = Status.OK if tokens else Status.OOM
    step = 1000.0 / tokens if tokens else None
    settings = {"system": system, "gpus": gpus, "device": device, **settings}
    return Configuration(
        Path("-".join(map(str, settings.values()))),
        ConfigFile(settings={}, system=system, gpus=gpus, device=device),
        Result(status=Ended(status.value), tokens_per_s_per_gpu=tokens, step_time_s=step, device=device),
        status,
        settings=settings,
    )


def ranked(*rows: Configuration) -> tuple[list[Ranked], list[str]]:
    return rank(RunView(Path("run"), "run", rows)), varying_settings(rows)


def assert_valid(chart: Chart | None) -> Chart:
    assert chart is not None
    figure = json.loads(re.sub(r"var\(--[a-z-]+\)", "#123456", json.dumps(chart.figure(), allow_nan=False)))
    go.Figure(data=figure["data"], layout=figure["layout"])
    return chart


def test_scaling_joins_equal_settings_over_gpus_only() -> None:
    rows = [row(100, gpus=8, wrap="block"), row(90, gpus=16, wrap="block"), row(80, gpus=32, wrap="block")]
    rows += [row(70, gpus=8, wrap="root"), row(None, gpus=16, wrap="root")]
    entries, varying = ranked(*rows)
    chart = assert_valid(scaling(entries, varying, TOKENS))
    assert len(chart.data) == 1
    assert (chart.data[0]["x"], chart.data[0]["y"]) == ([8, 16, 32], [100, 90, 80])
    assert [line[-1] for line in chart.table.rows] == ["100.0 %", "90.0 %", "80.0 %"]


def test_only_the_best_lines_are_drawn_and_the_rest_is_said() -> None:
    rows = [row(100 - batch - gpus, gpus=gpus, batch=batch) for batch in range(9) for gpus in (8, 16)]
    entries, varying = ranked(*rows)
    chart = assert_valid(scaling(entries, varying, TOKENS))
    assert len(chart.data) == MOST_LINES
    assert "3 more" in chart.note
    assert len(chart.table.rows) == 18


def test_predictions_meet_measurements_of_the_same_settings() -> None:
    rows = [row(100, device="sim", wrap="block"), row(80, device="cuda", wrap="block")]
    rows += [row(50, device="sim", wrap="root"), row(40, device="cuda", wrap="every-2")]
    entries, varying = ranked(*rows)
    chart = assert_valid(predicted_and_measured(entries, varying))
    assert (chart.data[1]["x"], chart.data[1]["y"]) == ([pytest.approx(12_500)], [pytest.approx(10_000)])
    assert chart.table.rows[0][-1] == "−20 %"
    assert "Mean error 20.0 %, worst 20.0 % over 1." in chart.note


@pytest.mark.parametrize("device", ["sim", "cuda"])
def test_one_kind_of_figures_alone_is_not_compared(device: str) -> None:
    entries, varying = ranked(row(100, device=device, wrap="block"), row(90, device=device, wrap="root"))
    assert predicted_and_measured(entries, varying) is None
