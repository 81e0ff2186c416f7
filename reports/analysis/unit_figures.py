"""Figures by FSDP unit: its collectives, and when its all-gathers came."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpbench.reports.analysis.device.activity import Activity
from fsdpbench.reports.analysis.device.units import FsdpSpans, unit_of
from fsdpbench.reports.analysis.figures import collective_figures
from fsdpbench.reports.analysis.measures.lateness import GatherTiming
from fsdpbench.reports.analysis.model import UnitAnalysis


def analyze_units(
    activity: Activity, spans: FsdpSpans, gathers: Sequence[GatherTiming]
) -> tuple[UnitAnalysis, ...]:
    """Every unit that communicated, over the whole trace, in order of first appearance."""
    work = activity.collectives.work
    unit = unit_of(spans, work.launch_lane, work.launch)
    return tuple(
        UnitAnalysis(
            name,
            collective_figures(activity, unit == number),
            tuple(gather for gather in gathers if gather.unit == name),
        )
        for number, name in enumerate(spans.units)
        if (unit == number).any()
    )
