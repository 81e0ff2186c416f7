"""The charts: valid plotly figures that hold the run's figures, with names taken out of force."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest

from fsdpbench.reports.pages import load_run
from fsdpbench.reports.pages import whole_run as charts
from fsdpbench.reports.pages.effects import effects
from fsdpbench.reports.pages.ranking import TOKENS, Ranked, metric_of, rank, varying_settings
from fsdpbench.reports.pages.view import RunView
from fsdpbench.reports.pages.whole_run import Chart, chart_text
from fsdpbench.reports.result import StepParts


@pytest.fixture(scope="module")
def view(sweep: Path) -> RunView:
    return load_run(sweep)


@pytest.fixture(scope="module")
def ranked(view: RunView) -> list[Ranked]:
    return rank(view)


def all_charts(view: RunView, ranked: list[Ranked]) -> list[Chart]:
    varying = varying_settings([entry.row for entry in ranked])
    drawn = [
        charts.breakdown(ranked, varying, metric_of(view)),
        charts.throughput_against_memory(ranked, varying, metric_of(view)),
        charts.effect_chart(effects(ranked)),
    ]
    assert all(drawn)
    return [chart for chart in drawn if chart]


def test_figures_are_valid_plotly(view: RunView, ranked: list[Ranked]) -> None:
    for chart in all_charts(view, ranked):
        text = re.sub(r"var\(--[a-z-]+\)", "#123456", json.dumps(chart.figure(), allow_nan=False))
        figure = json.loads(text)
        go.Figure(data=figure["data"], layout=figure["layout"])
        assert len(chart.table.rows) > 0
        assert all(len(row) == len(chart.table.columns) for row in chart.table.rows)


def test_every_colour_is_one_of_the_pages(view: RunView, ranked: list[Ranked]) -> None:
    css = (Path(charts.__file__).parent / "assets" / "report.css").read_text()
    text = json.dumps([chart.figure() for chart in all_charts(view, ranked)])
    used = set(re.findall(r"var\((--[a-z-]+)\)", text))
    assert used
    assert all(f"{name}:" in css for name in used)


def test_the_bars_parts_sum_to_the_traced_step(ranked: list[Ranked]) -> None:
    chart = charts.breakdown(ranked, [], TOKENS)
    assert chart is not None
    timed = [entry for entry in ranked if entry.throughput]
    for place, entry in enumerate(timed):
        step = entry.row.result.traced_step_time_s
        assert step is not None
        assert sum(trace["x"][place] for trace in chart.data) == pytest.approx(step * 1e3)


def test_steps_of_unlike_work_are_compared_for_the_same_work(ranked: list[Ranked]) -> None:
    first, second = ranked[0], ranked[1]
    result = msgspec.structs.replace(
        second.row.result,
        step_time_s=2 * (first.row.result.step_time_s or 0),
        traced_step_time_s=2 * (first.row.result.traced_step_time_s or 0),
        time_s=StepParts(*(2 * part for part in msgspec.structs.astuple(first.row.result.time_s))),
    )
    twice = replace(second, row=replace(second.row, result=result), throughput=first.throughput)
    chart = charts.breakdown([first, twice], [], TOKENS)
    assert chart is not None
    assert chart.layout["xaxis"]["title"]["text"] == "traced step, ms for 1,000 tokens"
    for bars in chart.data:
        assert bars["x"][0] == pytest.approx(bars["x"][1])


def test_only_the_best_bars_are_drawn_and_the_table_has_all(ranked: list[Ranked]) -> None:
    many = [entry for entry in ranked if entry.throughput] * 3
    chart = charts.breakdown(many, [], TOKENS)
    assert chart is not None
    assert len(chart.data[0]["x"]) == charts.MOST_BARS
    assert len(chart.table.rows) == 75
    assert "of 75" in chart.note


def test_without_figures_there_is_no_chart(view: RunView, ranked: list[Ranked]) -> None:
    failed = [entry for entry in ranked if not entry.throughput]
    assert failed
    assert charts.breakdown(failed, [], TOKENS) is None
    assert charts.throughput_against_memory(failed, [], metric_of(view)) is None
    assert charts.effect_chart([]) is None


def test_names_lose_their_markup_and_their_length() -> None:
    assert chart_text("<b>&\n x</b>") == "&lt;b&gt;&amp; x&lt;/b&gt;"
    assert len(chart_text("y" * 10_000)) == 60
