"""The one chart that explains a trace: how each rank's mean step is spent, and its phases."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpbench.reports.analysis import RankAnalysis, TimeParts
from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts.whole_run import PARTS, Chart, Table, chart_text

MOST_BARS = 16


def time_chart(ranks: Sequence[RankAnalysis], names: Sequence[str]) -> Chart | None:
    """A bar a rank, `names` beside them; of one rank also a bar a phase. None where nothing took time."""
    bars = [(name, rank.mean_step) for name, rank in zip(names, ranks, strict=True) if rank.time.total]
    if len(ranks) == 1:
        steps = max(len(ranks[0].steps), 1)
        bars += [(name, parts.per(steps)) for name, parts in ranks[0].phases.items() if parts.total]
    if not bars:
        return None
    shown = bars[:MOST_BARS]
    positions = list(range(len(shown)))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "y": positions,
            "x": [getattr(parts, part) / 1e6 for _, parts in shown],
            "marker": {"color": colour},
            "hovertemplate": words + " %{x:.4g} ms<extra></extra>",
        }
        for part, words, colour in PARTS
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.3,
        "height": 110 + 30 * len(shown),
        "xaxis": {"title": {"text": "mean step, ms"}, "rangemode": "tozero"},
        "yaxis": {
            "tickmode": "array",
            "tickvals": positions,
            "ticktext": [chart_text(name, 40) for name, _ in shown],
            "range": [len(shown) - 0.4, -0.6],
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        },
    }
    narrow = {"yaxis": {"ticktext": [chart_text(name, 14) for name, _ in shown]}}
    summary = "Stacked bars: compute only, overlapped, exposed communication and idle time of a mean step."
    note = f"The first {MOST_BARS} of {len(bars)}; the table has all." if len(bars) > MOST_BARS else ""
    return Chart("time", summary, data, layout, _table(bars), narrow, note)


def _table(bars: Sequence[tuple[str, TimeParts]]) -> Table:
    rows = tuple(
        (
            name,
            *(display.ms(getattr(parts, part) / 1e6) for part, _, _ in PARTS),
            display.ms(parts.total / 1e6),
            display.percent(parts.overlap_fraction),
        )
        for name, parts in bars
    )
    return Table(("what", *(f"{words}, ms" for _, words, _ in PARTS), "in all, ms", "overlap"), rows)
