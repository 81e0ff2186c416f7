"""The offline page: a section per figure, with chart, claims, assumptions and the traces that explain it.

A figure has the same chart type as in the publication. Published values are filled and joined by solid lines,
simulated ones are hollow and dotted. Behind them is the band of other settings that the publication may
have used.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpbench.engine.results.provenance import versions
from fsdpbench.engine.results.records import Status
from fsdpbench.lab.reproduce.figure import LEAST_LEVEL, LEAST_RATIO, PART_OF_EFFECT, Drawing, Kind
from fsdpbench.lab.reproduce.outcome import Judged, Outcome, Simulated, Verdict, counted
from fsdpbench.lab.reproduce.run import TracedRun, summed_up
from fsdpbench.reports.pages import shell
from fsdpbench.reports.pages.display import NOTHING, WORDS, percent, signed_percent
from fsdpbench.reports.pages.whole_run import Chart, Table, axis, error_bars, scatter

_SCRIPTS = (f"{shell.ASSETS}/theme.js", f"{shell.ASSETS}/timeline.js", "lab/reproduce/page.js")
_COLOURS = WORDS["charts"]["pairs"]
_ENDED = {Status.OOM: "out of memory", Status.OK: ""}
_BAND = "other plausible settings"
_ROOM = 1.5
"""The largest height of the chart for the band, relative to the highest value."""


def write_page(
    path: Path,
    publication: str,
    outcomes: Sequence[Outcome],
    traced: Sequence[Sequence[Sequence[TracedRun]]],
    seconds: float,
) -> None:
    """Write the page with the `traced` runs of each figure; scripts are inlined, nothing is loaded."""
    counts = counted(outcomes)
    tests = [claim for each in outcomes for claim in each.claims if claim.verdict is not Verdict.TAKEN]
    shell.write_page(
        path,
        "lab/reproduce/page.html.jinja",
        scripts=_SCRIPTS,
        publication=publication,
        sections=list(zip(outcomes, map(chart_of, outcomes), traced, strict=True)),
        claims_table=lambda outcome: Table(_COLUMNS, tuple(map(_row, outcome.claims))),
        variants_table=_variants,
        summed_up=summed_up,
        summary=_summary(outcomes),
        holding=counts[Verdict.HOLDS],
        tests=len(tests),
        directions=sum(claim.same_direction for claim in tests),
        counts=counts,
        verdicts=Verdict,
        not_holding=_not_holding(outcomes),
        allowed=(PART_OF_EFFECT, LEAST_RATIO, LEAST_LEVEL),
        versions=versions(),
        seconds=seconds,
    )


_COLUMNS = ("claim", "bounds", "published", "simulated", "under other settings", "verdict")


def _not_holding(outcomes: Sequence[Outcome]) -> Table:
    """Return the claims that do not hold; first those that hold under no plausible settings."""
    rows = [
        (outcome.figure.name, *_row(claim))
        for verdict in (Verdict.FAILS, Verdict.DEPENDS, Verdict.UNKNOWN, Verdict.TAKEN)
        for outcome in outcomes
        for claim in outcome.claims
        if claim.verdict is verdict
    ]
    return Table(("figure", *_COLUMNS), tuple(rows))


def _row(each: Judged) -> tuple[str, ...]:
    kind, others = each.claim.kind, each.others
    span = (min(others), max(others)) if others else ()
    return (
        each.claim.words,
        _bounds(each),
        _value(each.published, kind),
        _value(each.simulated, kind),
        " to ".join(dict.fromkeys(_value(value, kind) for value in span)),
        f"{each.verdict.value}: {each.claim.taken}" if each.claim.taken else each.verdict.value,
    )


def _bounds(each: Judged) -> str:
    low, high, kind = each.bounds.low, each.bounds.high, each.claim.kind
    if math.isinf(high):
        return f"at least {low:g}"
    return f"{low:g}" if low == high else f"{_value(low, kind)} to {_value(high, kind)}"


def _value(value: float | None, kind: Kind) -> str:
    if value is None:
        return NOTHING
    return f"{value:.3f}" if kind is Kind.RATIO else number(value) if kind is Kind.LEVEL else f"{value:g}"


def _variants(outcome: Outcome) -> Table:
    rows = tuple(
        (
            each.variant.words,
            each.variant.contradicts,
            str(len(each.values)),
            percent(each.mean_error, 0),
            percent(outcome.mean_error_of(each), 0),
            str(sum(value is None for value in each.values.values())) if None in each.values.values() else "",
        )
        for each in outcome.tried
    )
    columns = ("other settings", "what is stated", "points", "mean error with them", "as assumed")
    return Table((*columns, "without a value"), rows)


def _summary(outcomes: Sequence[Outcome]) -> Table:
    rows = tuple(
        (
            each.figure.name,
            each.figure.words.title,
            str(len(each.points)),
            f"{counts[Verdict.HOLDS]} of {len(each.claims) - counts[Verdict.TAKEN]}" if each.claims else "",
            percent(each.mean_error),
            f"{percent(min(errors), 0)} to {percent(max(errors), 0)}" if len(errors) > 1 else "",
            percent(each.worst_error),
            "" if not each.points else "not in full" if each.figure.is_open else "yes",
        )
        for each in outcomes
        for counts, errors in [(counted([each]), each.mean_errors)]
    )
    columns = (
        *("figure", "of", "points", "claims that hold", "mean error", "under other settings", "worst"),
        "settings published",
    )
    return Table(columns, rows)


def chart_of(outcome: Outcome) -> Chart | None:
    """Return the chart of a figure; None if the publication gives no values."""
    if not outcome.points:
        return None
    figure = outcome.figure
    lines = figure.drawing is Drawing.LINES
    data: list[dict[str, object]] = []
    for index, series in enumerate(dict.fromkeys(each.point.series for each in outcome.points)):
        points = [each for each in outcome.points if each.point.series == series]
        colours = _COLOURS[index % len(_COLOURS)]
        data += _lines(series, points, colours) if lines else _bars(series, points, colours)
    data.sort(key=lambda trace: trace["name"] != _BAND)  # draw the band behind everything else
    for place, trace in enumerate(each for each in data if each["name"] == _BAND):
        trace["showlegend"] = place == 0
    bars = {} if lines else {"barmode": "group", "bargap": 0.2}
    values = axis(figure.about.unit, rangemode="tozero", zeroline=False)
    layout = {"height": 420, "yaxis": values, "xaxis": _places(outcome, lines), **bars}
    note = ""
    if most := _cut_at(outcome):
        values["range"] = [0, most]
        note = "Other settings reach beyond the picture; the table has their range."
    narrow = {"height": 480, "xaxis": {"tickangle": -60 if not lines else -45}}
    summary = f"{figure.words.title}: published and simulated {figure.about.unit}."
    return Chart(f"chart-{figure.name}", summary, data, layout, _table(outcome), narrow, note)


def _cut_at(outcome: Outcome) -> float | None:
    """Return where to cut the chart so that both sides are visible; None if the band leaves enough room."""
    shown = [value for each in outcome.points for value in (each.point.published, each.value) if value]
    most = _ROOM * max(shown, default=0.0)
    return most if any(each.band and each.band[1] > most for each in outcome.points) else None


def _places(outcome: Outcome, lines: bool) -> dict[str, object]:
    places = list(dict.fromkeys(each.point.x for each in outcome.points))
    if not lines:
        return axis(outcome.figure.x_title, type="category", categoryarray=[str(place) for place in places])
    log = {"type": "log"} if outcome.figure.log_x else {}
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": [str(place) for place in places]}
    return axis(outcome.figure.x_title, showgrid=False, **log, **ticks)


def _lines(series: str, points: list[Simulated], colours: tuple[str, str]) -> list[dict[str, object]]:
    full, soft = colours
    published = [(each.point.x, each.point.published) for each in points if each.point.published is not None]
    simulated = [each for each in points if each.value is not None]
    drawn = [
        scatter(
            "lines+markers",
            f"{series}, published",
            [x for x, _ in published],
            [y for _, y in published],
            line={"color": full, "width": 2},
            marker={"color": full, "size": 8},
            hovertemplate=_hover(series),
        ),
        scatter(
            "lines+markers",
            f"{series}, simulated",
            [each.point.x for each in simulated],
            [each.value for each in simulated],
            line={"color": full, "width": 2, "dash": "dot"},
            marker={"color": full, "size": 9, "symbol": "diamond-open"},
            customdata=[_off(each) for each in simulated],
            hovertemplate=_hover(series, simulated=True),
        ),
    ]
    banded = [(each.point.x, *each.band) for each in points if each.band]
    around = [(x, high) for x, _, high in banded] + [(x, low) for x, low, _ in reversed(banded)]
    if banded:
        area = {"fill": "toself", "fillcolor": soft, "line": {"width": 0}, "opacity": 0.45}
        xs, ys = zip(*around, strict=True)
        drawn.append(scatter("lines", _BAND, xs, ys, hoverinfo="skip", **area))
    return drawn


def _hover(series: str, simulated: bool = False) -> str:
    of, more = ("simulated", " (%{customdata})") if simulated else ("published", "")
    return f"{series}, {of}: %{{y:.5~g}}{more}<extra></extra>"


def _bars(series: str, points: list[Simulated], colours: tuple[str, str]) -> list[dict[str, object]]:
    full, soft = colours

    def bars(of: str, heights: list[float | None], texts: list[str], **more: Any) -> dict[str, object]:
        """Return one bar per point, with a text above it."""
        places, words = [str(each.point.x) for each in points], {"text": texts, "textposition": "outside"}
        upright = {"textangle": -90, "cliponaxis": False}
        return {
            "type": "bar",
            "name": f"{series}, {of}",
            "x": places,
            "y": heights,
            **words,
            **upright,
            **more,
        }

    outline = {"color": soft, "line": {"color": full, "width": 1.5}}
    simulated = bars(
        "simulated",
        # A run out of memory gets a bar without height, so that its text is shown.
        [0.0 if each.status is Status.OOM else each.value for each in points],
        [_ENDED.get(each.status, each.status.value) if each.value is None else "" for each in points],
        marker={**outline, "pattern": {"shape": "/", "fgcolor": full}},
        customdata=[_off(each) for each in points],
        hovertemplate=_hover(series, simulated=True),
    )
    if any(each.band for each in points):
        spans = [(each.value or 0.0, each.band) for each in points]
        above = [band[1] - value if band else 0 for value, band in spans]
        below = [value - band[0] if band else 0 for value, band in spans]
        simulated["error_y"] = error_bars(above, below, color="var(--text)", thickness=1, width=4)
    published = bars(
        "published",
        [each.point.published or 0.0 for each in points],
        ["out of memory" if each.point.published is None else "" for each in points],
        marker={"color": full},
        hovertemplate=_hover(series),
    )
    return [published, simulated]


def _off(each: Simulated) -> str:
    return "" if each.error is None else signed_percent(each.error)


def number(value: float | None) -> str:
    """Format a number with three to four digits."""
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
    unit, of = figure.about.unit, figure.x_title or "of"
    columns = ("series", of, f"published, {unit}", "simulated", "error", "90 % interval", *[_BAND] * banded)
    return Table(columns, rows)
