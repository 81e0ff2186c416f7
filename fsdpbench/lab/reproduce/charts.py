"""A figure as the publication draws it, published and simulated in one chart, with the table behind it.

Published values are filled and joined by solid lines, simulated ones are hollow and dotted; behind them
is the band of other settings that may have been the publication's.
"""

from __future__ import annotations

from typing import Any

from fsdpbench.engine.results.records import Status
from fsdpbench.lab.reproduce.figure import Drawing, Place
from fsdpbench.lab.reproduce.outcome import Outcome, Simulated
from fsdpbench.reports.pages.display import NOTHING, signed_percent
from fsdpbench.reports.pages.whole_run import Chart, Table

_COLOURS = (
    ("var(--compute)", "var(--overlapped)"),
    ("var(--exposed)", "var(--other-soft)"),
    ("var(--allreduce)", "var(--allreduce-soft)"),
    ("var(--reduce)", "var(--reduce-soft)"),
    ("var(--gather)", "var(--gather-soft)"),
    ("var(--copy)", "var(--idle)"),
)
_BAND = "other plausible settings"
_ROOM = 1.5
"""How far above the highest value the picture may reach for the band."""

_UPRIGHT = {"textposition": "outside", "textangle": -90, "cliponaxis": False}


def chart_of(outcome: Outcome) -> Chart | None:
    """The chart of a figure; None where the publication gives no values."""
    if not outcome.points:
        return None
    figure = outcome.figure
    lines = figure.drawing is Drawing.LINES
    data: list[dict[str, Any]] = []
    for index, series in enumerate(dict.fromkeys(each.point.series for each in outcome.points)):
        points = [each for each in outcome.points if each.point.series == series]
        colours = _COLOURS[index % len(_COLOURS)]
        data += _lines(series, points, colours) if lines else _bars(series, points, colours)
    data.sort(key=lambda trace: trace["name"] != _BAND)  # behind everything else
    for place, trace in enumerate(each for each in data if each["name"] == _BAND):
        trace["showlegend"] = place == 0
    layout: dict[str, Any] = {
        "height": 420,
        "yaxis": {"title": {"text": figure.about.unit}, "rangemode": "tozero", "zeroline": False},
        "xaxis": _axis(outcome, lines),
    }
    if not lines:
        layout |= {"barmode": "group", "bargap": 0.2}
    note = ""
    if most := _cut_at(outcome):
        layout["yaxis"] |= {"range": [0, most]}
        note = "Other settings reach beyond the picture; the table has their range."
    narrow = {"height": 480, "xaxis": {"tickangle": -60 if not lines else -45}}
    summary = f"{figure.words.title}: published and simulated {figure.about.unit}."
    return Chart(f"chart-{figure.name}", summary, data, layout, _table(outcome), narrow, note)


def _cut_at(outcome: Outcome) -> float | None:
    """Where to cut the picture so that both sides can be seen; None: the band leaves them room."""
    shown = [value for each in outcome.points for value in (each.point.published, each.value) if value]
    most = _ROOM * max(shown, default=0.0)
    return most if any(each.band and each.band[1] > most for each in outcome.points) else None


def _axis(outcome: Outcome, lines: bool) -> dict[str, Any]:
    places = list(dict.fromkeys(each.point.x for each in outcome.points))
    title = {"text": outcome.figure.x_title}
    if not lines:
        return {"title": title, "type": "category", "categoryarray": [str(place) for place in places]}
    log = {"type": "log"} if outcome.figure.log_x else {}
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": [str(place) for place in places]}
    return {"title": title, "showgrid": False, **log, **ticks}


def _lines(series: str, points: list[Simulated], colours: tuple[str, str]) -> list[dict[str, Any]]:
    full, soft = colours
    published = [each for each in points if each.point.published is not None]
    simulated = [each for each in points if each.value is not None]
    common = {"type": "scatter", "mode": "lines+markers"}
    drawn: list[dict[str, Any]] = [
        {
            **common,
            "name": f"{series}, published",
            "x": [each.point.x for each in published],
            "y": [each.point.published for each in published],
            "line": {"color": full, "width": 2},
            "marker": {"color": full, "size": 8},
            "hovertemplate": f"{series}, published: %{{y:.5~g}}<extra></extra>",
        },
        {
            **common,
            "name": f"{series}, simulated",
            "x": [each.point.x for each in simulated],
            "y": [each.value for each in simulated],
            "line": {"color": full, "width": 2, "dash": "dot"},
            "marker": {"color": full, "size": 9, "symbol": "diamond-open"},
            "customdata": [_off(each) for each in simulated],
            "hovertemplate": f"{series}, simulated: %{{y:.5~g}} (%{{customdata}})<extra></extra>",
        },
    ]
    banded = [(each.point.x, *each.band) for each in points if each.band]
    if banded:
        there = [(x, high) for x, _, high in banded]
        back = [(x, low) for x, low, _ in reversed(banded)]
        drawn.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": _BAND,
                "x": [x for x, _ in (*there, *back)],
                "y": [y for _, y in (*there, *back)],
                "fill": "toself",
                "fillcolor": soft,
                "line": {"width": 0},
                "opacity": 0.45,
                "hoverinfo": "skip",
            }
        )
    return drawn


def _bars(series: str, points: list[Simulated], colours: tuple[str, str]) -> list[dict[str, Any]]:
    full, soft = colours
    simulated = {
        "type": "bar",
        "name": f"{series}, simulated",
        "x": [_category(each.point.x) for each in points],
        "y": [_height(each.value, each.status is Status.OOM) for each in points],
        "text": [_absent(each.status) if each.value is None else "" for each in points],
        **_UPRIGHT,
        "marker": {
            "color": soft,
            "line": {"color": full, "width": 1.5},
            "pattern": {"shape": "/", "fgcolor": full},
        },
        "customdata": [_off(each) for each in points],
        "hovertemplate": f"{series}, simulated: %{{y:.5~g}} (%{{customdata}})<extra></extra>",
    }
    if any(each.band for each in points):
        spans = [(each.value or 0.0, each.band) for each in points]
        simulated["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [band[1] - value if band else 0 for value, band in spans],
            "arrayminus": [value - band[0] if band else 0 for value, band in spans],
            "color": "var(--text)",
            "thickness": 1,
            "width": 4,
        }
    published = {
        "type": "bar",
        "name": f"{series}, published",
        "x": [_category(each.point.x) for each in points],
        "y": [_height(each.point.published, each.point.published is None) for each in points],
        "text": ["out of memory" if each.point.published is None else "" for each in points],
        **_UPRIGHT,
        "marker": {"color": full},
        "hovertemplate": f"{series}, published: %{{y:.5~g}}<extra></extra>",
    }
    return [published, simulated]


def _height(value: float | None, ran_out: bool) -> float | None:
    """Return a bar's height: a run out of memory has one without height, so that its text is there."""
    return 0.0 if ran_out else value


def _category(x: Place) -> str:
    return str(x)


def _absent(status: Status) -> str:
    return "out of memory" if status is Status.OOM else "" if status is Status.OK else status.value


def _off(each: Simulated) -> str:
    return "" if each.error is None else signed_percent(each.error)


def number(value: float | None) -> str:
    """Three to four digits, as figures of this page have."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _range(values: tuple[float, float] | None) -> str:
    return "" if values is None else f"{number(values[0])} to {number(values[1])}"


def _table(outcome: Outcome) -> Table:
    figure = outcome.figure
    banded = any(each.band for each in outcome.points)
    rows = tuple(
        (
            each.point.series,
            str(each.point.x),
            "out of memory" if each.point.published is None else number(each.point.published),
            number(each.value) if each.status is Status.OK else each.status.value,
            _off(each),
            _range(each.interval),
            *((_range(each.band),) if banded else ()),
        )
        for each in outcome.points
    )
    columns = (
        *(
            "series",
            figure.x_title or "of",
            f"published, {figure.about.unit}",
            "simulated",
            "error",
            "90 % interval",
        ),
        *((_BAND,) if banded else ()),
    )
    return Table(columns, rows)
