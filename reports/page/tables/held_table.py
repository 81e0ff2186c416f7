"""What the device's memory holds at the allocation peak, by the phase and the event that allocated it."""

from __future__ import annotations

from fsdpbench.reports.analysis import MemoryAnalysis
from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts.whole_run import Table

# The largest rows; the rest is one more.
_MOST_ROWS = 12
_MOST_UNITS = 40

_PHASES = ("forward", "backward", "optimizer")


def held_table(memory: MemoryAnalysis) -> Table | None:
    """Bytes alive at the peak, largest first, units taken together; None where the trace does not tell."""
    if not memory.at_peak or not memory.peak_allocated:
        return None
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for holding in memory.at_peak:
        units = groups.setdefault((holding.phase or "outside phases", holding.event), {})
        units[holding.unit or ""] = units.get(holding.unit or "", 0) + holding.bytes
    lines = [
        (phase, event.replace("_", "-"), _units(units), sum(units.values()))
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
    """Bytes alive at the peak, by the phase that took them; empty where the trace does not tell."""
    if not memory.at_peak or not memory.peak_allocated:
        return {}
    held = {"before the trace": memory.before_trace or 0}
    for holding in memory.at_peak:
        phase = holding.phase or "outside phases"
        held[phase] = held.get(phase, 0) + holding.bytes
    return held


def held_by_unit(memory: MemoryAnalysis) -> Table | None:
    """What each unit holds at the peak, by the phase that allocated it; None where no unit is named."""
    by_unit: dict[str, dict[str, int]] = {}
    for holding in memory.at_peak:
        held = by_unit.setdefault(holding.unit or "", {})
        phase = holding.phase or "outside phases"
        held[phase] = held.get(phase, 0) + holding.bytes
    if not memory.peak_allocated or not by_unit.keys() - {""}:
        return None
    seen = dict.fromkeys(phase for held in by_unit.values() for phase in held)
    phases = sorted(seen, key=lambda phase: _PHASES.index(phase) if phase in _PHASES else len(_PHASES))
    ordered = sorted(by_unit, key=lambda unit: -sum(by_unit[unit].values()))
    rows = [
        (
            unit[:80] or "no unit",
            *(display.gib(by_unit[unit].get(phase, 0)) for phase in phases),
            display.gib(sum(by_unit[unit].values())),
            display.percent(sum(by_unit[unit].values()) / memory.peak_allocated),
        )
        for unit in ordered[:_MOST_UNITS]
    ]
    if rest := sum(sum(by_unit[unit].values()) for unit in ordered[_MOST_UNITS:]):
        words = f"{len(ordered) - _MOST_UNITS} units more"
        share = display.percent(rest / memory.peak_allocated)
        rows.append((words, *("" for _ in phases), display.gib(rest), share))
    return Table(("FSDP unit", *(f"{phase}, GiB" for phase in phases), "GiB", "of the peak"), tuple(rows))


def _units(units: dict[str, int]) -> str:
    named = {unit: size for unit, size in units.items() if unit}
    if not named:
        return ""
    largest = max(named, key=lambda unit: named[unit])
    return largest[:80] if len(named) == 1 else f"{len(named)} units, most {largest[:80]}"
