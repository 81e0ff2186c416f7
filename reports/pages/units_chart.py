"""Communication by FSDP unit: how much of it is hidden, and which all-gathers come too late and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fsdpbench.reports.analysis import CollectiveFigures, RankAnalysis, UnitAnalysis
from fsdpbench.reports.analysis.lateness import GatherTiming
from fsdpbench.reports.analysis.naming import PATTERNS
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.whole_run import Chart, Table, axis, chart_text

_NAMED = ("all_gather", "reduce_scatter", "all_reduce")
_OTHER = "other"

# Kind, its words, its colour on the page ("-soft": the hidden part).
_KINDS = (
    ("all_gather", "all-gather", "gather"),
    ("reduce_scatter", "reduce-scatter", "reduce"),
    ("all_reduce", "all-reduce", "allreduce"),
    (_OTHER, "other", "other"),
)
CAUSES: Mapping[str, str] = PATTERNS["late"]

# Labels more than these cannot be read side by side (wide, narrow window).
_MOST_TICKS, _MOST_NARROW_TICKS = 34, 10


def units_chart(analysis: RankAnalysis) -> Chart | None:
    """Return the mean step by unit, with a sentence on it; None where the trace names no units."""
    steps = len(analysis.steps)
    if not steps or not analysis.units:
        return None
    kinds = [kind for kind in _KINDS if any(_figures(unit, kind[0]) for unit in analysis.units)]
    data = [
        _bars(analysis.units, steps, kind, exposed=exposed) for kind in kinds for exposed in (True, False)
    ]
    names = [chart_text(unit.unit, 40) for unit in analysis.units]
    layout = {
        "barmode": "stack",
        "height": 330,
        "bargap": 0.2,
        "xaxis": {**_ticks(names, _MOST_TICKS), "tickangle": -90, "showgrid": False},
        "yaxis": axis("ms a step", rangemode="tozero"),
    }
    narrow = {"xaxis": _ticks(names, _MOST_NARROW_TICKS)}
    return Chart("units", _lead(analysis, steps), data, layout, _table(analysis.units, steps), narrow)


def _ticks(names: Sequence[str], most: int) -> dict[str, object]:
    places = list(range(0, len(names), max(1, -(-len(names) // most))))
    return {"tickvals": places, "ticktext": [names[place] for place in places]}


def _bars(
    units: Sequence[UnitAnalysis], steps: int, kind: tuple[str, str, str], *, exposed: bool
) -> dict[str, object]:
    name, words, colour = kind
    return {
        "type": "bar",
        "name": f"{words}, {'exposed' if exposed else 'hidden'}",
        "x": list(range(len(units))),
        "y": [round(_ns(unit, name, exposed=exposed) / steps / 1e6, 4) for unit in units],
        "marker": {"color": f"var(--{colour})" if exposed else f"var(--{colour}-soft)"},
        "customdata": [chart_text(unit.unit) for unit in units],
        "hovertemplate": "%{customdata}<br>%{y:.4g} ms<extra>%{fullData.name}</extra>",
    }


def _figures(unit: UnitAnalysis, kind: str) -> list[CollectiveFigures]:
    """Return the unit's figures of one kind; `other` is all that has no bar of its own."""
    if kind == _OTHER:
        return [figures for name, figures in unit.communication.items() if name not in _NAMED]
    return [unit.communication[kind]] if kind in unit.communication else []


def _ns(unit: UnitAnalysis, kind: str, *, exposed: bool) -> int:
    found = _figures(unit, kind)
    return sum(each.exposed if exposed else each.time - each.exposed for each in found)


def _lead(analysis: RankAnalysis, steps: int) -> str:
    worst = max(analysis.units, key=lambda unit: unit.exposed)
    total = sum(unit.exposed for unit in analysis.units)
    if not total:
        return "All communication of every unit is hidden under computation."
    share = display.percent(worst.exposed / total, 0)
    exposed = f"{display.ms(worst.exposed / steps / 1e6)} ms exposed a step, {share} of all"
    late = [gather for gather in analysis.gathers if gather.cause is not None]
    if not late:
        return f"The unit that waits longest is {worst.unit[:120]}: {exposed}."
    causes = ", ".join(f"{amount} {words}" for words, amount in _counted(late).most_common(3))
    return (
        f"The unit that waits longest is {worst.unit[:120]}: {exposed}. "
        f"{len(late)} of {len(analysis.gathers)} all-gathers came late ({causes})."
    )


def _counted(gathers: Sequence[GatherTiming]) -> Counter[str]:
    return Counter(CAUSES[gather.cause] for gather in gathers if gather.cause is not None)


def _table(units: Sequence[UnitAnalysis], steps: int) -> Table:
    kinds = [(kind, words) for kind, words, _ in _KINDS if any(_figures(unit, kind) for unit in units)]
    columns = ["unit"]
    for _, words in kinds:
        columns += [f"{words} calls", f"{words}, ms", f"{words} exposed, ms"]
    columns += ["gathers late", "late, ms", "why late"]
    return Table(tuple(columns), tuple(_row(unit, [kind for kind, _ in kinds], steps) for unit in units))


def _row(unit: UnitAnalysis, kinds: Sequence[str], steps: int) -> tuple[str, ...]:
    cells = [unit.unit[:200]]
    for kind in kinds:
        found = _figures(unit, kind)
        time, exposed = sum(each.time for each in found), sum(each.exposed for each in found)
        calls = sum(each.count for each in found)
        times = (display.ms(ns / steps / 1e6) for ns in (time, exposed))
        cells += [display.count(calls / steps), *times]
    late = [gather for gather in unit.gathers if gather.cause is not None]
    why = ", ".join(words for words, _ in _counted(late).most_common(2))
    behind = Counter(gather.behind for gather in late if gather.behind).most_common(1)
    reason = f"{why} behind {behind[0][0][:60]}" if behind else why
    cells += [display.count(len(late) / steps), display.ms(sum(g.late for g in late) / steps / 1e6), reason]
    return tuple(cells)
