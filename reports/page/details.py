"""What the page shows of one configuration: its timeline, memory, units, phases, settings, files.

Everything comes from the trace of the lowest rank that left one; a trace that cannot be read leaves its
message in the place of the charts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.reports.analysis import RankAnalysis, TimeParts, analyze_trace
from fsdpbench.reports.analysis.findings import Verdict
from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts import Table
from fsdpbench.reports.page.held_table import held_by_phase, held_by_unit, held_table
from fsdpbench.reports.page.idle_table import idle_table
from fsdpbench.reports.page.memory_chart import memory_chart
from fsdpbench.reports.page.ranking import Ranked, short_label
from fsdpbench.reports.page.ranks_table import ranks_table
from fsdpbench.reports.page.timeline_data import pack_timeline
from fsdpbench.reports.page.units_chart import units_chart
from fsdpbench.reports.page.view import Configuration, Status
from fsdpbench.reports.run_files import ResultFile
from fsdpbench.reports.trace import Trace, TraceError, read_trace

Links = Callable[[Configuration], list[dict[str, str]]]

# What all timelines together may take of the page, in events of about 25 bytes, and the most for one of them.
_EVENTS_IN_ALL = 180_000
_MOST_EVENTS = 6_000


@dataclass(frozen=True, slots=True)
class Detail:
    """One configuration's part of the page: `content` is what its script draws, in plain JSON values. `held`:
    bytes alive at the peak of its trace, by the phase that took them."""

    folder: str
    place: int | None
    words: str
    content: dict[str, Any]
    verdict: Verdict | None = None
    held: Mapping[str, int] = field(default_factory=dict)


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
        "verdict": [],
        "timeline": None,
        "retries": [],
        "memory": None,
        "memory_note": None,
        "held": None,
        "held_by_unit": None,
        "ranks": None,
        "units": None,
        "phases": None,
        "idle": None,
        "communication": None,
        "settings": [[name, display.setting(value)[:2000]] for name, value in row.settings.items()],
        "results": _results(entry),
        "links": links(row),
    }
    verdict, held = None, {}
    if row.traces:
        try:
            trace = read_trace(row.traces[0])
            analysis = analyze_trace(trace)
            verdict, held = analysis.verdict, held_by_phase(analysis.memory)
            content |= _from_trace(row, trace, analysis, most)
        except TraceError as error:
            content["warnings"] = [f"{error.path.name} is not shown: {error.reason}"]
    return Detail(row.folder.name, entry.place, words[:160], content, verdict, held)


def _from_trace(row: Configuration, trace: Trace, analysis: RankAnalysis, most: int) -> dict[str, Any]:
    """The parts that need the trace."""
    step = analysis.steps[-1] if analysis.steps else None
    packed = pack_timeline(trace, step, most) if step else None
    memory = memory_chart(trace, analysis, row.capacity_bytes, min(600, 60 + most // 6))
    held, by_unit = held_table(analysis.memory), held_by_unit(analysis.memory)
    idle = idle_table(analysis)
    ranks = ranks_table(analysis, row.traces[1:])
    return {
        "warnings": _warnings(analysis),
        "timeline": packed,
        "retries": _retry_offsets(trace, analysis),
        "memory": memory.figure if memory else None,
        "memory_table": _island_table(memory.table) if memory else None,
        "memory_note": None if memory else "The trace has no memory events.",
        "units": _units(analysis),
        "verdict": _verdict(analysis),
        "held": _island_table(held) if held else None,
        "held_by_unit": _island_table(by_unit) if by_unit else None,
        "idle": _island_table(idle) if idle else None,
        "ranks": {"lead": ranks.lead, "table": _island_table(ranks.table)} if ranks else None,
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
    return (name, *(_ms(amount) for amount in amounts), display.percent(parts.overlap_fraction))


def _communication(analysis: RankAnalysis) -> dict[str, Any] | None:
    """By collective type, the mean step."""
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
    return _island_table(Table(columns, rows))


def _units(analysis: RankAnalysis) -> dict[str, Any] | None:
    chart = units_chart(analysis)
    if chart is None:
        return None
    return {"lead": chart.lead, "figure": chart.figure, "table": _island_table(chart.table)}


def _verdict(analysis: RankAnalysis) -> list[str]:
    """What the analysis concludes: its findings in order of what they cost, or why there are none."""
    verdict = analysis.verdict
    if verdict is None:
        return []
    return [finding.text for finding in verdict.findings] or [verdict.sentence]


def _results(entry: Ranked) -> list[list[str]]:
    """Every figure of the result, in words."""
    result = entry.row.result
    peaks = result.peak_memory_bytes
    each = "rank" if entry.row.device == "cpu" else "GPU"
    pairs = [
        ("status", entry.row.status.words),
        (f"tokens/s/{each}", display.number(result.tokens_per_s_per_gpu, 5)),
        (f"samples/s/{each}", display.number(result.samples_per_s_per_gpu, 4)),
        ("step time", _with_unit(display.milliseconds(result.step_time_s), "ms")),
        ("traced step time", _with_unit(display.milliseconds(result.traced_step_time_s), "ms")),
        (f"model TFLOPS/{each}", display.number(result.tflops_per_gpu, 4)),
        (f"hardware TFLOPS/{each}", display.number(result.hardware_tflops_per_gpu, 4)),
        ("MFU / HFU", f"{display.percent(result.mfu)} / {display.percent(result.hfu)}"),
        ("overlap", display.percent(result.overlap_fraction)),
        ("peak allocated", display.size(peaks.allocated if peaks else None)),
        ("peak active", display.size(peaks.active if peaks else None)),
        ("peak reserved", display.size(peaks.reserved if peaks else None)),
        ("allocator retries a step", display.count(result.alloc_retries_per_step)),
        ("out-of-memory errors", display.count(result.ooms)),
    ]
    pairs += _sampling(result)
    if result.loss:
        known = [value for value in result.loss if value is not None]
        pairs.append(
            (
                "loss",
                f"{display.number(known[0], 5)} → {display.number(known[-1], 5)}"
                if known
                else display.NOTHING,
            )
        )
    return [list(pair) for pair in pairs if display.NOTHING not in pair[1].split(" / ")[0]]


def _sampling(result: ResultFile) -> list[tuple[str, str]]:
    """How the step time was measured, where it was."""
    pairs = []
    if result.repeats and len(result.repeats.step_time_s) > 1:
        times = [display.milliseconds(time) for time in sorted(result.repeats.step_time_s)]
        pairs.append((f"step over {result.repeats.runs} runs", f"{times[0]} to {times[-1]} ms"))
    if result.measured and len(result.measured.step_times_s) > 1:
        told = f"{len(result.measured.step_times_s)}, spread {display.percent(result.measured.spread)}"
        pairs.append(("steps in a run", told))
    if result.measured and result.measured.profiler_overhead is not None:
        pairs.append(("profiler's overhead", display.percent(result.measured.profiler_overhead)))
    return pairs


def _with_unit(text: str, unit: str) -> str:
    return text if text == display.NOTHING else f"{text} {unit}"


def _ms(ns: float) -> str:
    return display.ms(ns / 1e6)


def _island_table(table: Table) -> dict[str, Any]:
    return {"columns": table.columns, "rows": table.rows, "numeric": sorted(table.numeric)}
