"""What a page shows of one rank's trace: timeline, memory, units, phases, kernels, as its scripts draw it."""

from __future__ import annotations

from typing import Any

from fsdpbench.reports.analysis import RankAnalysis, TimeParts
from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts.memory_chart import memory_chart
from fsdpbench.reports.page.charts.timeline_data import pack_timeline
from fsdpbench.reports.page.charts.units_chart import units_chart
from fsdpbench.reports.page.charts.whole_run import Table
from fsdpbench.reports.page.tables.held_table import held_by_unit, held_table
from fsdpbench.reports.page.tables.idle_table import idle_table
from fsdpbench.reports.page.tables.work_tables import island_table, work_tables
from fsdpbench.reports.trace import Trace


def trace_parts(trace: Trace, analysis: RankAnalysis, capacity: float | None, most: int) -> dict[str, Any]:
    """What is drawn of one rank, in plain JSON values. `capacity`: bytes of the device's memory, where known;
    `most`: events of the timeline."""
    step = analysis.steps[-1] if analysis.steps else None
    packed = pack_timeline(trace, step, most) if step else None
    memory = memory_chart(trace, analysis, capacity, min(600, 60 + most // 6))
    held, by_unit = held_table(analysis.memory), held_by_unit(analysis.memory)
    idle = idle_table(analysis)
    return {
        "warnings": _warnings(analysis),
        "timeline": packed,
        "retries": _retry_offsets(trace, analysis),
        "memory": memory.figure if memory else None,
        "memory_table": island_table(memory.table) if memory else None,
        "memory_note": None if memory else "The trace has no memory events.",
        "units": _units(analysis),
        "verdict": _verdict(analysis),
        "held": island_table(held) if held else None,
        "held_by_unit": island_table(by_unit) if by_unit else None,
        "idle": island_table(idle) if idle else None,
        "phases": _phases(analysis),
        "communication": _communication(analysis),
        **work_tables(analysis.tables, len(analysis.steps)),
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
    return island_table(
        Table(
            ("phase", "compute only", "overlapped", "exposed", "idle", "in all", "overlap"),
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
    return island_table(Table(columns, rows))


def _units(analysis: RankAnalysis) -> dict[str, Any] | None:
    chart = units_chart(analysis)
    if chart is None:
        return None
    return {"lead": chart.lead, "figure": chart.figure, "table": island_table(chart.table)}


def _verdict(analysis: RankAnalysis) -> list[str]:
    """What the analysis concludes: its findings in order of what they cost, or why there are none."""
    verdict = analysis.verdict
    if verdict is None:
        return []
    return [finding.text for finding in verdict.findings] or [verdict.sentence]


def _ms(ns: float) -> str:
    return display.ms(ns / 1e6)
