"""What the page shows of one configuration: its timeline, memory, units, phases, settings, files.

Everything comes from the trace of the lowest rank that left one; a trace that cannot be read leaves its
message in the place of the charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reports.analysis import CollectiveFigures, RankAnalysis, TimeParts, UnitAnalysis, analyze_trace
from reports.page import format
from reports.page.charts import Table, chart_text
from reports.page.memory_chart import memory_chart
from reports.page.ranking import Ranked, short_label
from reports.page.timeline_data import pack_timeline
from reports.page.view import Configuration, Status
from reports.trace import Trace, TraceError, read_trace

Links = Callable[[Configuration], list[dict[str, str]]]

# What all timelines together may take of the page, in events of about 25 bytes, and the most for one of them.
_EVENTS_IN_ALL = 180_000
_MOST_EVENTS = 6_000


@dataclass(frozen=True, slots=True)
class Detail:
    """One configuration's part of the page: `content` is what its script draws, in plain JSON values."""

    folder: str
    place: int | None
    words: str
    content: dict[str, Any]
    advice: tuple[str, ...] = ()


def build_details(ranked: Sequence[Ranked], varying: Sequence[str], links: Links) -> list[Detail]:
    """A detail for every configuration, in the order of the ranking."""
    traced = sum(bool(entry.row.traces) for entry in ranked)
    most = min(_MOST_EVENTS, _EVENTS_IN_ALL // max(1, traced))
    return [_detail(entry, varying, links, most) for entry in ranked]


def _detail(entry: Ranked, varying: Sequence[str], links: Links, most: int) -> Detail:
    row = entry.row
    words = (
        f"{entry.place}. {short_label(row, varying)}"
        if entry.place
        else f"{short_label(row, varying)} ({row.status.words})"
    )
    content: dict[str, Any] = {
        "problem": row.problem if row.status is not Status.OK else None,
        "warnings": [],
        "timeline": None,
        "retries": [],
        "memory": None,
        "memory_note": None,
        "units": None,
        "phases": None,
        "communication": None,
        "settings": [[name, format.setting(value)[:2000]] for name, value in row.settings.items()],
        "results": _results(entry),
        "links": links(row),
    }
    if row.traces:
        try:
            content |= _from_trace(row, most)
        except TraceError as error:
            content["warnings"] = [f"{error.path.name} is not shown: {error.reason}"]
    return Detail(row.folder.name, entry.place, words[:160], content)


def _from_trace(row: Configuration, most: int) -> dict[str, Any]:
    """The parts that need the trace."""
    trace = read_trace(row.traces[0])
    analysis = analyze_trace(trace)
    step = analysis.steps[-1] if analysis.steps else None
    packed = pack_timeline(trace, step, most) if step else None
    memory = memory_chart(trace, analysis, row.capacity_bytes, min(600, 60 + most // 6))
    return {
        "warnings": _warnings(analysis),
        "timeline": packed,
        "retries": _retry_offsets(trace, analysis),
        "memory": memory.figure if memory else None,
        "memory_table": _island_table(memory.table) if memory else None,
        "memory_note": None if memory else "The trace has no memory events.",
        "units": _units(analysis),
        "phases": _phases(analysis),
        "communication": _communication(analysis),
    }


def _warnings(analysis: RankAnalysis) -> list[str]:
    doubts = [] if analysis.trusted else ["The figures of this trace are not to be trusted as they are:"]
    return [*doubts, *analysis.warnings]


def _retry_offsets(trace: Trace, analysis: RankAnalysis) -> list[int]:
    """Retries inside the shown step, ns from its start."""
    step = analysis.steps[-1]
    return [int(time) - step.start for time in trace.retries.time if step.start <= time < step.end]


def _phases(analysis: RankAnalysis) -> dict[str, Any] | None:
    """Parts of forward, backward and optimizer of the mean step, ms."""
    steps = len(analysis.steps)
    if not steps or not analysis.phases:
        return None
    spans = [*((name, parts) for name, parts in analysis.phases.items()), ("step", analysis.time)]
    return _island_table(
        Table(
            (
                "phase",
                *("compute only", "overlapped", "exposed", "idle", "in all"),
                "overlap",
            ),
            tuple(_phase_row(name, parts.per(steps)) for name, parts in spans),
        )
    )


def _phase_row(name: str, parts: TimeParts) -> tuple[str, ...]:
    amounts = (parts.compute_only, parts.overlapped, parts.exposed_communication, parts.idle, parts.total)
    return (name, *(_ms(amount) for amount in amounts), format.percent(parts.overlap_fraction))


def _communication(analysis: RankAnalysis) -> dict[str, Any] | None:
    """By collective type, the mean step."""
    steps = len(analysis.steps)
    if not steps or not analysis.communication:
        return None
    rows = tuple(
        (
            name.replace("_", "-"),
            format.count(figures.count / steps),
            format.size(figures.bytes / steps if figures.bytes is not None else None),
            _ms(figures.time / steps),
            _ms(figures.exposed / steps),
            format.number(figures.bus_bandwidth / 1e9) if figures.bus_bandwidth else format.NOTHING,
        )
        for name, figures in analysis.communication.items()
    )
    columns = ("collective", "calls", "size", "time, ms", "exposed, ms", "bus, GB/s")
    return _island_table(Table(columns, rows))


def _units(analysis: RankAnalysis) -> dict[str, Any] | None:
    """Hidden and exposed communication of every FSDP unit, the mean step."""
    steps = len(analysis.steps)
    if not steps or not analysis.units:
        return None
    names = [chart_text(unit.unit, 40) for unit in analysis.units]
    data = [
        {
            "type": "bar",
            "name": f"{words}, {'exposed' if exposed else 'hidden'}",
            "x": list(range(len(names))),
            "y": [round(_unit_ns(unit, kind, exposed=exposed) / steps / 1e6, 4) for unit in analysis.units],
            "marker": {"color": f"var(--{colour})" if exposed else f"var(--{colour}-soft)"},
            "customdata": names,
            "hovertemplate": "%{customdata}<br>%{y:.4g} ms<extra>%{fullData.name}</extra>",
        }
        for kind, words, colour in (
            ("all_gather", "all-gather", "gather"),
            ("reduce_scatter", "reduce-scatter", "reduce"),
            ("all_reduce", "all-reduce", "allreduce"),
        )
        if any(kind in unit.communication for unit in analysis.units)
        for exposed in (True, False)
    ]
    every = max(1, -(-len(names) // 34))
    ticks = list(range(0, len(names), every))
    layout = {
        "barmode": "stack",
        "height": 330,
        "bargap": 0.2,
        "xaxis": {
            "tickvals": ticks,
            "ticktext": [names[tick] for tick in ticks],
            "tickangle": -90,
            "showgrid": False,
        },
        "yaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"},
        "legend": {
            "orientation": "h",
            "y": 1,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
    }
    few = ticks[:: max(1, len(ticks) // 9)]
    narrow = {"xaxis": {"tickvals": few, "ticktext": [names[tick] for tick in few]}}
    return {
        "lead": _units_lead(analysis.units, steps),
        "figure": {"data": data, "layout": layout, "narrow": narrow},
        "table": _island_table(_units_table(analysis.units, steps)),
    }


def _unit_ns(unit: UnitAnalysis, kind: str, *, exposed: bool) -> int:
    figures = unit.communication.get(kind)
    if figures is None:
        return 0
    return figures.exposed if exposed else figures.time - figures.exposed


def _units_lead(units: Sequence[UnitAnalysis], steps: int) -> str:
    worst = max(units, key=lambda unit: unit.exposed)
    total = sum(unit.exposed for unit in units)
    if not total:
        return "All communication of every unit is hidden under computation."
    share = format.percent(worst.exposed / total, 0)
    exposed = f"{_ms(worst.exposed / steps)} ms exposed a step, {share} of all"
    return f"The unit that waits longest is {worst.unit[:120]}: {exposed}."


def _units_table(units: Sequence[UnitAnalysis], steps: int) -> Table:
    def cells(figures: CollectiveFigures | None) -> tuple[str, ...]:
        if figures is None:
            return ("", "", "")
        return (format.count(figures.count / steps), _ms(figures.time / steps), _ms(figures.exposed / steps))

    kinds = [
        k for k in ("all_gather", "reduce_scatter", "all_reduce") if any(k in u.communication for u in units)
    ]
    columns = ["unit"]
    for kind in kinds:
        words = kind.replace("_", "-")
        columns += [f"{words}s a step", f"{words}, ms", f"{words} exposed, ms"]
    rows = tuple(
        (unit.unit[:200], *(cell for kind in kinds for cell in cells(unit.communication.get(kind))))
        for unit in units
    )
    return Table(tuple(columns), rows)


def _results(entry: Ranked) -> list[list[str]]:
    """Every figure of the result, in words."""
    result = entry.row.result
    peaks = result.peak_memory_bytes
    pairs = [
        ("status", entry.row.status.words),
        ("tokens/s/GPU", format.number(result.tokens_per_s_per_gpu, 5)),
        ("samples/s/GPU", format.number(result.samples_per_s_per_gpu, 4)),
        ("step time", _with_unit(format.milliseconds(result.step_time_s), "ms")),
        ("traced step time", _with_unit(format.milliseconds(result.traced_step_time_s), "ms")),
        ("model TFLOPS/GPU", format.number(result.tflops_per_gpu, 4)),
        ("hardware TFLOPS/GPU", format.number(result.hardware_tflops_per_gpu, 4)),
        ("MFU / HFU", f"{format.percent(result.mfu)} / {format.percent(result.hfu)}"),
        ("overlap", format.percent(result.overlap_fraction)),
        ("peak allocated", format.size(peaks.allocated if peaks else None)),
        ("peak active", format.size(peaks.active if peaks else None)),
        ("peak reserved", format.size(peaks.reserved if peaks else None)),
        ("allocator retries a step", format.count(result.alloc_retries_per_step)),
        ("out-of-memory errors", format.count(result.ooms)),
    ]
    if result.loss:
        known = [value for value in result.loss if value is not None]
        pairs.append(
            (
                "loss",
                f"{format.number(known[0], 5)} → {format.number(known[-1], 5)}" if known else format.NOTHING,
            )
        )
    return [list(pair) for pair in pairs if format.NOTHING not in pair[1].split(" / ")[0]]


def _with_unit(text: str, unit: str) -> str:
    return text if text == format.NOTHING else f"{text} {unit}"


def _ms(ns: float) -> str:
    return format.ms(ns / 1e6)


def _island_table(table: Table) -> dict[str, Any]:
    return {"columns": table.columns, "rows": table.rows, "numeric": sorted(table.numeric)}
