"""Parts of a page that show one rank's trace: timeline, memory, units, phases, kernels, ranks."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.reports.analysis import (
    CollectiveFigures,
    MemoryAnalysis,
    RankAnalysis,
    RanksSummary,
    TimeParts,
    UnitAnalysis,
    analyze_trace,
)
from fsdpbench.reports.analysis.analyze import summarize
from fsdpbench.reports.analysis.figures import PARTS
from fsdpbench.reports.analysis.idle import IDLE_WORDS
from fsdpbench.reports.analysis.lateness import GatherTiming
from fsdpbench.reports.analysis.naming import PATTERNS
from fsdpbench.reports.analysis.operators import KernelTotal, Rate, WorkTables
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.memory_charts import memory_chart
from fsdpbench.reports.pages.timeline import pack_timeline
from fsdpbench.reports.pages.whole_run import Chart, Table, axis, chart_text, island_table
from fsdpbench.reports.readers import Trace, TraceError, read_trace

_DOUBTED = "The figures of this trace are not to be trusted as they are:"
_NAMED = ("all_gather", "reduce_scatter", "all_reduce")
_OTHER = "other"

# Kind, its words, its color on the page ("-soft": the hidden part).
_KINDS = display.WORDS["collectives"]["rows"]
CAUSES: Mapping[str, str] = PATTERNS["late"]

# More labels than this are unreadable side by side (wide, narrow window).
_MOST_TICKS, _MOST_NARROW_TICKS = 34, 10


def trace_parts(trace: Trace, analysis: RankAnalysis, capacity: float | None, most: int) -> dict[str, object]:
    """Return the parts of one rank in plain JSON values.

    Args:
        analysis: the analysis of `trace`.
        capacity: bytes of the device's memory, if known.
        most: limit on the events of the timeline.
    """
    step = analysis.steps[-1] if analysis.steps else None
    packed = pack_timeline(trace, step, most) if step else None
    memory = memory_chart(trace, analysis, capacity, min(600, 60 + most // 6))
    units = units_chart(analysis)
    return {
        "warnings": [*([] if analysis.trusted else [_DOUBTED]), *analysis.warnings],
        "timeline": packed,
        "retries": [
            int(time) - step.start for time in trace.retries.time if step and step.start <= time < step.end
        ],
        "memory": memory.figure() if memory else None,
        "memory_table": island_table(memory.table if memory else None),
        "memory_note": None if memory else "The trace has no memory events.",
        "units": units
        and {"lead": units.summary, "figure": units.figure(), "table": island_table(units.table)},
        "verdict": analysis.verdict.texts if analysis.verdict else [],
        "held": island_table(held_table(analysis.memory)),
        "held_by_unit": island_table(held_by_unit(analysis.memory)),
        "idle": island_table(idle_table(analysis)),
        "phases": island_table(_phases(analysis)),
        "communication": island_table(_communication(analysis)),
        **work_tables(analysis.tables, len(analysis.steps)),
    }


def _phases(analysis: RankAnalysis) -> Table | None:
    """Return the time parts of forward, backward and optimizer for a mean step, ms."""
    steps = len(analysis.steps)
    if not steps or not analysis.phases:
        return None
    spans = [*analysis.phases.items(), ("step", analysis.time)]
    means = [(name, parts.per(steps)) for name, parts in spans]
    columns = ("phase", "compute only", "overlapped", "exposed", "idle", "in all", "overlap")
    return Table(columns, tuple((name, *part_cells(mean)) for name, mean in means))


def part_cells(parts: TimeParts) -> tuple[str, ...]:
    """Return the four parts and their sum, ms, and the overlap."""
    amounts = (*(getattr(parts, name) for name in PARTS), parts.total)
    return (*(_ms(amount) for amount in amounts), display.percent(parts.overlap_fraction))


def _communication(analysis: RankAnalysis) -> Table | None:
    """Return the mean step's collectives by type."""
    steps = len(analysis.steps)
    if not steps or not analysis.communication:
        return None
    rows = tuple(
        (
            name.replace("_", "-"),
            display.count(figures.count / steps),
            display.size(figures.bytes / steps if figures.bytes is not None else None),
            _ms(figures.time / steps),
            _ms(figures.exposed / steps),
            display.number(figures.bus_bandwidth / 1e9) if figures.bus_bandwidth else display.NOTHING,
            display.percent(figures.roof_share, 0),
        )
        for name, figures in analysis.communication.items()
    )
    roof = f"of {analysis.links.name}'s peak" if analysis.links else "of the best one seen"
    columns = ("collective", "calls", "size", "time, ms", "exposed, ms", "bus, GB/s", roof)
    return Table(columns, rows)


def _ms(ns: float) -> str:
    return display.ms(ns / 1e6)


# The largest rows are shown; one more row sums up the rest.
_MOST_ROWS = 12
_MOST_UNITS = 40

_PHASES = ("forward", "backward", "optimizer")


def held_table(memory: MemoryAnalysis) -> Table | None:
    """Return bytes alive at the peak, largest first, summed over units; None if the trace does not say."""
    if not memory.at_peak or not memory.peak_allocated:
        return None
    groups: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for holding in memory.at_peak:
        groups[holding.phase or "outside phases", holding.event][holding.unit or ""] += holding.bytes
    lines = [
        (phase, event.replace("_", "-"), _unit_words(units), units.total())
        for (phase, event), units in groups.items()
    ]
    lines.sort(key=lambda line: -line[3])
    rest = sum(line[3] for line in lines[_MOST_ROWS:])
    shown = [*lines[:_MOST_ROWS], *([("", "everything else", "", rest)] if rest else [])]
    if memory.before_trace:
        shown.append(("before the trace", "parameters, optimizer state, ...", "", memory.before_trace))
    rows = [
        (*line[:3], display.gib(line[3]), display.percent(line[3] / memory.peak_allocated)) for line in shown
    ]
    if memory.unused_at_peak is not None:
        rows.append(("", "reserved, not allocated", "", display.gib(memory.unused_at_peak), ""))
    return Table(("allocated in", "by", "FSDP unit", "GiB", "of the peak"), tuple(rows))


def held_by_phase(memory: MemoryAnalysis) -> dict[str, int]:
    """Return bytes alive at the peak, by the phase that allocated them; empty if the trace does not say."""
    if not memory.at_peak or not memory.peak_allocated:
        return {}
    held = Counter({"before the trace": memory.before_trace or 0})
    for holding in memory.at_peak:
        held[holding.phase or "outside phases"] += holding.bytes
    return held


def held_by_unit(memory: MemoryAnalysis) -> Table | None:
    """Return the bytes that each unit holds at the peak, by phase; None if no unit is named."""
    by_unit: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for holding in memory.at_peak:
        by_unit[holding.unit or ""][holding.phase or "outside phases"] += holding.bytes
    if not memory.peak_allocated or not by_unit.keys() - {""}:
        return None
    seen = dict.fromkeys(phase for held in by_unit.values() for phase in held)
    phases = sorted(seen, key=lambda phase: _PHASES.index(phase) if phase in _PHASES else len(_PHASES))
    ordered = sorted(by_unit.items(), key=lambda item: -item[1].total())
    rows = [
        (
            unit[:80] or "no unit",
            *(display.gib(held[phase]) for phase in phases),
            display.gib(held.total()),
            display.percent(held.total() / memory.peak_allocated),
        )
        for unit, held in ordered[:_MOST_UNITS]
    ]
    if rest := sum(held.total() for _, held in ordered[_MOST_UNITS:]):
        words = f"{len(ordered) - _MOST_UNITS} units more"
        share = display.percent(rest / memory.peak_allocated)
        rows.append((words, *("" for _ in phases), display.gib(rest), share))
    return Table(("FSDP unit", *(f"{phase}, GiB" for phase in phases), "GiB", "of the peak"), tuple(rows))


def _unit_words(units: Counter[str]) -> str:
    named = [unit for unit, _ in units.most_common() if unit]
    if not named:
        return ""
    largest = named[0]
    return largest[:80] if len(named) == 1 else f"{len(named)} units, most {largest[:80]}"


def idle_table(analysis: RankAnalysis) -> Table | None:
    """Return the causes of idle time, with times and shares of the step; None if they are unknown."""
    parts = analysis.idle_causes.parts()
    if not parts or not analysis.time.total:
        return None
    steps = max(len(analysis.steps), 1)
    rows = [
        (IDLE_WORDS[name], display.ms(ns / steps / 1e6), display.percent(ns / analysis.time.total))
        for name, ns in sorted(parts.items(), key=lambda item: -item[1])
        if ns
    ]
    return Table.of(("idle because of", "ms a step", "of the step"), rows)


MOST_KERNELS = 40
MOST_OPERATORS = 30
MOST_MODULES = 40


def work_tables(tables: WorkTables, steps: int) -> dict[str, object]:
    """Return the tables for a page's script; times are per mean step, empty tables are None."""
    steps = max(steps, 1)
    found = {
        "kernels": _kernels(tables, tables.kernels[:MOST_KERNELS], steps, "kernel"),
        "families": _kernels(tables, tables.families, steps, "kind of work"),
        "operators": _operators(tables, steps),
        "modules": _modules(tables, steps),
        "devices": _devices(tables, steps) if len(tables.devices) > 1 else None,
    }
    content = {name: island_table(table) for name, table in found.items()}
    return content | {"roof_note": _roof_note(tables)}


def _kernels(tables: WorkTables, shown: Sequence[KernelTotal], steps: int, what: str) -> Table | None:
    rows = [
        {
            what: each.name[:160],
            "kind of work": each.family,  # for a family this is its name
            "a step": display.count(round(each.count / steps, 2)),
            "ms a step": _ms(each.time / steps),
            **({"mean, us": display.number(each.time / each.count / 1e3)} if what == "kernel" else {}),
            "share": display.percent(each.share),
            **dict(zip(_RATES, _rate(each.rate), strict=True)),
        }
        for each in shown
    ]
    return Table.of(tuple(rows[0]), (tuple(row.values()) for row in rows)) if rows else None


_RATES = ("TFLOPS", "GB/s", "of the peak")


def _rate(rate: Rate) -> tuple[str, str, str]:
    values = rate.to_dict()
    speed = values["bytes_per_s"]
    return (
        display.number(values["tflops"]),
        display.NOTHING if speed is None else display.number(speed / 1e9),
        display.percent(values["roof_share"]),
    )


def _operators(tables: WorkTables, steps: int) -> Table | None:
    rows = [
        (
            each.name[:80],
            each.shapes[:80],
            display.count(round(each.count / steps, 2)),
            _ms(each.time / steps),
            display.percent(each.share),
            display.number(each.intensity),
            *_rate(each.rate),
            each.bound or display.NOTHING,
        )
        for each in tables.operators[:MOST_OPERATORS]
    ]
    columns = ("operator", "shapes", "a step", "ms a step", "share", "FLOPs a byte", *_RATES, "bound by")
    return Table.of(columns, rows)


def _modules(tables: WorkTables, steps: int) -> Table | None:
    rows = [
        (
            each.name,
            display.count(each.instances),
            display.count(round(each.calls / steps, 2)),
            _ms(each.own / steps),
            _ms(each.time / steps),
            display.percent(each.share),
        )
        for each in tables.modules[:MOST_MODULES]
    ]
    columns = ("module", "instances", "calls a step", "own, ms a step", "with those inside, ms", "share")
    return Table.of(columns, rows)


def _devices(tables: WorkTables, steps: int) -> Table:
    rows = tuple(
        (
            str(each.device),
            _ms(each.computing / steps),
            _ms(each.communicating / steps),
            _ms((each.span - each.busy) / steps),
            display.percent((each.span - each.busy) / each.span if each.span else None),
        )
        for each in tables.devices
    )
    return Table(("device", "computation, ms a step", "communication, ms", "idle, ms", "idle"), rows)


def _roof_note(tables: WorkTables) -> str:
    sentences = []
    hidden = len(tables.kernels) - MOST_KERNELS
    if hidden > 0:
        time = sum(each.time for each in tables.kernels[MOST_KERNELS:])
        share = display.percent(time / tables.total if tables.total else None)
        sentences.append(f"{hidden} more names are left out ({share} of the time together).")
    if tables.roof is not None:
        sentences.append(error_text("trace_parts.roof", tables.roof))
    elif any(each.rate.time for each in tables.kernels):
        sentences.append("No peak is known for this device (`fsdpbench analyze --hardware` names a profile).")
    if not tables.operators:
        sentences.append("The trace has no shapes (record_shapes=True): FLOPs and bytes are not known.")
    return " ".join(sentences)


# Reading more traces for every configuration would take too long; `analyze` reads all.
_MOST_RANKS = 16


def ranks_table(first: RankAnalysis, others: Sequence[Path]) -> tuple[str, Table] | None:
    """Return a sentence that compares rank `first` (already analyzed) with those of the other traces, and a
    table with a row per rank; None without others."""
    ranks = [first]
    unread = 0
    for path in others[: _MOST_RANKS - 1]:
        try:
            ranks.append(analyze_trace(read_trace(path)))
        except TraceError:
            unread += 1
    if len(ranks) < 2:
        return None
    summary = summarize(ranks, unread)
    left_out = len(others) + 1 - len(ranks) - unread
    return _lead(summary, unread, left_out), Table(_COLUMNS, tuple(_row(rank, summary) for rank in ranks))


_COLUMNS = (
    *("rank", "step, ms", "compute only, ms", "overlapped, ms", "exposed, ms", "idle, ms", "overlap"),
    *("waits for ranks, ms", "of all waiting caused"),
)


def _row(rank: RankAnalysis, summary: RanksSummary) -> tuple[str, ...]:
    *parts, total, _ = part_cells(rank.mean_step)
    waiting = summary.waiting
    waited = waiting.waited.get(rank.rank) if waiting else None
    return (
        str(rank.rank),
        *(total, *parts),
        display.percent(rank.overlap_fraction),
        display.NOTHING if waited is None else display.ms(waited / max(1, len(rank.steps)) / 1e6),
        display.percent(waiting.caused.get(rank.rank) if waiting else None, 0),
    )


def _lead(summary: RanksSummary, unread: int, left_out: int) -> str:
    words = {"summary": summary, "unread": unread, "left_out": left_out, "percent": display.percent}
    return " ".join(rendered_beside(__file__, "ranks.jinja", **words).splitlines())


def units_chart(analysis: RankAnalysis) -> Chart | None:
    """Return a chart of the mean step by unit, with a summary; None if the trace names no units."""
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
    return Chart("units", _summary_line(analysis, steps), data, layout, _table(analysis.units, steps), narrow)


def _ticks(names: Sequence[str], most: int) -> dict[str, list[int] | list[str]]:
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
        "y": [
            round(sum(one.exposed if exposed else one.time - one.exposed for one in found) / steps / 1e6, 4)
            for found in (_figures(unit, name) for unit in units)
        ],
        "marker": {"color": f"var(--{colour})" if exposed else f"var(--{colour}-soft)"},
        "customdata": [chart_text(unit.unit) for unit in units],
        "hovertemplate": "%{customdata}<br>%{y:.4g} ms<extra>%{fullData.name}</extra>",
    }


def _figures(unit: UnitAnalysis, kind: str) -> list[CollectiveFigures]:
    """Return the unit's figures of one kind; `other` is every kind without its own bar."""
    if kind == _OTHER:
        return [figures for name, figures in unit.communication.items() if name not in _NAMED]
    return [unit.communication[kind]] if kind in unit.communication else []


def _summary_line(analysis: RankAnalysis, steps: int) -> str:
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
    return error_text(
        "trace_parts.longest", worst.unit[:120], exposed, len(late), len(analysis.gathers), causes
    )


def _counted(gathers: Sequence[GatherTiming]) -> Counter[str]:
    return Counter(CAUSES[gather.cause] for gather in gathers if gather.cause is not None)


def _table(units: Sequence[UnitAnalysis], steps: int) -> Table:
    kinds = [(kind, words) for kind, words, _ in _KINDS if any(_figures(unit, kind) for unit in units)]
    columns = ["unit"]
    for _, words in kinds:
        columns += [f"{words} calls", f"{words}, ms", f"{words} exposed, ms"]
    columns += ["gathers late", "late, ms", "why late"]
    return Table(tuple(columns), tuple(_unit_row(unit, [kind for kind, _ in kinds], steps) for unit in units))


def _unit_row(unit: UnitAnalysis, kinds: Sequence[str], steps: int) -> tuple[str, ...]:
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
