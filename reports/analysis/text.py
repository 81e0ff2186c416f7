"""The analysis as plain text for a terminal."""

from __future__ import annotations

import re
from collections import Counter

from fsdpbench.base.reading import printable
from fsdpbench.reports.analysis.figures import CollectiveFigures, TimeParts
from fsdpbench.reports.analysis.idle import IDLE_WORDS
from fsdpbench.reports.analysis.memory import MemoryAnalysis
from fsdpbench.reports.analysis.model import Analysis, RankAnalysis, RanksSummary
from fsdpbench.reports.analysis.snapshots import SnapshotAnalysis
from fsdpbench.reports.analysis.stragglers import Waiting

_MS = 1e6
_MIB = 2**20
_MAX_UNITS = 12
_MAX_HELD = 6
_MAX_GROUPS = 8
_MAX_RETRIES = 8
_WORTH_NS = 1000


def describe(analysis: Analysis) -> str:
    """Return a few lines a rank, then lines on the ranks together."""
    lines: list[str] = []
    for rank in analysis.ranks:
        lines += [*_rank(rank), ""]
    for name, summary in analysis.configurations.items():
        lines += across(name, summary)
        if summary.waiting is not None:
            lines += _communicators(summary.waiting)
        lines += [f"note: {warning}" for warning in summary.warnings]
    for snapshot in analysis.snapshots:
        lines += [*_snapshot(snapshot), ""]
    lines += [f"left out: {problem.path}: {problem.reason}" for problem in analysis.problems]
    return "\n".join(printable(line) for line in lines).rstrip()


def across(name: str, summary: RanksSummary) -> list[str]:
    """Return sentences on the ranks of the configuration `name` together."""
    place = f"{name}: " if name else ""
    sentences = []
    if len(summary.ranks) > 1:
        step = summary.figures["step_time_s"]
        sentences.append(
            f"{place}{len(summary.ranks)} ranks, mean step {1e3 * step.least:.3f} to "
            f"{1e3 * step.greatest:.3f} ms, slowest rank {summary.slowest_rank}."
        )
    if summary.waiting is not None and (straggler := summary.waiting.straggler) is not None:
        share = 100 * summary.waiting.caused[straggler]
        sentences.append(
            f"{place}rank {straggler} is the last to join and causes {share:.0f} % of the waiting."
        )
    return sentences


def _rank(rank: RankAnalysis) -> list[str]:
    simulated = ", simulated" if rank.simulated else ""
    place = f"{rank.configuration}, " if rank.configuration else ""
    steps = _count(len(rank.steps), "step")
    lines = [
        f"{place}rank {rank.rank} ({rank.kind} trace{simulated}, {rank.how}, {steps}): {rank.path}",
        f"  {'trusted' if rank.trusted else 'NOT trusted'}",
        *(f"  note: {warning}" for warning in rank.warnings),
    ]
    if rank.verdict is not None:
        lines.append(f"  {rank.verdict.sentence}")
    overlap = "unknown" if rank.overlap_fraction is None else f"{100 * rank.overlap_fraction:.2f} %"
    lines.append(f"  communication hidden under computation: {overlap}")
    lines.append(f"  {'mean step':<16}{_parts(rank.mean_step)}")
    lines += [
        f"  {name:<16}{_parts(parts.per(max(len(rank.steps), 1)))}" for name, parts in rank.phases.items()
    ]
    lines += _idle(rank)
    for name, figures in sorted(rank.communication.items()):
        size = "" if figures.bytes is None else f", {figures.bytes / 1e6:.1f} MB"
        lines.append(
            f"  {name:<16}{figures.count} x, {figures.time / _MS:.3f} ms, "
            f"{figures.exposed / _MS:.3f} ms exposed{size}{_bandwidth(figures, rank)}"
        )
    lines += _fused(rank)
    lines += _units(rank)
    lines += _memory(rank.memory)
    lines += _retries(rank)
    return lines


def _fused(rank: RankAnalysis) -> list[str]:
    """Return a line for each group of fused kernels of the same operators."""
    steps = max(len(rank.steps), 1)
    groups = rank.fused
    lines = [
        f"  {'fused kernels':<16}{group.time / steps / _MS:.3f} ms, {group.count / steps:g} a step: "
        f"{group.kind} of {group.operators}"
        for group in groups[:_MAX_GROUPS]
    ]
    if len(groups) > _MAX_GROUPS:
        rest = groups[_MAX_GROUPS:]
        time = sum(group.time for group in rest) / steps / _MS
        lines.append(f"  and {_count(len(rest), 'group')} of fused kernels more, {time:.3f} ms")
    return lines


def _bandwidth(figures: CollectiveFigures, rank: RankAnalysis) -> str:
    """Return the achieved bus bandwidth against its peak."""
    if figures.bus_bandwidth is None or figures.best_bandwidth is None:
        return ""
    text = f", {figures.bus_bandwidth / 1e9:.2f} GB/s bus bandwidth, best {figures.best_bandwidth / 1e9:.2f}"
    share = f"{100 * (figures.roof_share or 0):.0f} %"
    if figures.roof_bandwidth is not None and rank.links is not None:
        return f"{text}, {share} of {rank.links.name}'s {figures.roof_bandwidth / 1e9:.0f}"
    return f"{text}, {share} of it (the peak of this hardware is not known)"


def _memory(memory: MemoryAnalysis) -> list[str]:
    """Return the peaks, and the allocations alive at the peak, units of one phase together."""
    if memory.peak_allocated is None:
        return []
    peaks = f"{memory.peak_allocated / _MIB:.1f} MiB allocated"
    peaks += f", {memory.peak_active / _MIB:.1f} MiB active" if memory.peak_active else ""
    if memory.peak_reserved:
        peaks += f", {memory.peak_reserved / _MIB:.1f} MiB reserved"
        peaks += f", {_count(len(memory.retries), 'allocator retry', 'allocator retries')}"
    held: Counter[str] = Counter()
    for each in memory.at_peak:
        unit = re.sub(r"[0-9]+", "*", each.unit or "no unit")
        held[f"{each.phase or 'outside phases'}, {unit}, {each.event}"] += each.bytes
    if memory.before_trace:
        held["before the trace"] = memory.before_trace
    return [f"  peak memory     {peaks}"] + [
        f"  at the peak     {size / _MIB:10.1f} MiB  {words}" for words, size in held.most_common(_MAX_HELD)
    ]


def _communicators(waiting: Waiting) -> list[str]:
    """Return who waited how long in which communicator, where the ranks are in several."""
    lines = [
        f"  among {group.group or 'all ranks'}: {group.matched} collectives, waited "
        + ", ".join(f"rank {rank} {ns / _MS:.3f} ms" for rank, ns in group.waited.items())
        for group in waiting.groups[:_MAX_UNITS]
        if len(waiting.groups) > 1
    ]
    return lines + [
        f"  among {name or 'all ranks'}: the ranks' collectives differ, so waiting times are unknown"
        for name in waiting.unmatched
    ]


def _retries(rank: RankAnalysis) -> list[str]:
    """Return a line for each allocator retry with its place and its cost."""
    lines = []
    for retry in rank.memory.retries[:_MAX_RETRIES]:
        step = None if retry.step is None else f"step {retry.step}"
        where = ", ".join(each for each in (step, retry.phase, retry.unit) if each is not None)
        cost = "" if retry.cost is None else f", computation stood still for {retry.cost / _MS:.3f} ms"
        driver = f", {retry.calls} allocator calls in {retry.driver / _MS:.3f} ms" if retry.calls else ""
        lines.append(
            f"  retry           {where or 'outside the steps'}: {retry.bytes / 2**20:.1f} MiB asked for, "
            f"{retry.freed / 2**20:.1f} MiB freed{cost}{driver}"
        )
    if len(rank.memory.retries) > _MAX_RETRIES:
        lines.append(f"  and {len(rank.memory.retries) - _MAX_RETRIES} retries more")
    return lines


def _idle(rank: RankAnalysis) -> list[str]:
    """Return why the device was idle in a mean step."""
    steps = max(len(rank.steps), 1)
    parts = {
        name: ns / steps / _MS for name, ns in rank.idle_causes.parts().items() if ns >= _WORTH_NS * steps
    }
    if not parts:
        return []
    text = ", ".join(f"{time:.3f} ms {IDLE_WORDS[name]}" for name, time in parts.items())
    return [f"  {'idle because of':<16}{text}"]


def _snapshot(snapshot: SnapshotAnalysis) -> list[str]:
    peak = (snapshot.peak_allocated, snapshot.peak_active, snapshot.peak_reserved)
    end = (snapshot.allocated, snapshot.active, snapshot.reserved)
    text = "{:.1f} MiB allocated, {:.1f} active, {:.1f} reserved"
    lines = [
        f"memory snapshot, device {snapshot.device}: {snapshot.path}",
        "  peak  " + text.format(*(each / _MIB for each in peak)),
        "  end   " + text.format(*(each / _MIB for each in end)),
        f"        {snapshot.split / _MIB:.1f} MiB free in segments partly in use, largest free block "
        f"{snapshot.largest_free / _MIB:.1f}, {snapshot.rounding / _MIB:.1f} by rounding up",
    ]
    lines += [f"  out of memory: {size / _MIB:.1f} MiB were asked for" for size in snapshot.ooms]
    return lines + [
        f"  at the peak  {held.bytes / _MIB:10.1f} MiB  {held.where}"
        for held in snapshot.holders[:_MAX_UNITS]
    ]


def _units(rank: RankAnalysis) -> list[str]:
    """Return lines on the units with most exposed communication."""
    worst = sorted(rank.units, key=lambda unit: unit.exposed, reverse=True)
    lines = [
        f"  unit {unit.unit:<20} {unit.exposed / _MS:.3f} ms exposed ("
        + ", ".join(
            f"{name} {each.exposed / _MS:.3f} of {each.time / _MS:.3f}"
            for name, each in sorted(unit.communication.items())
        )
        + ")"
        for unit in worst[:_MAX_UNITS]
    ]
    if len(worst) > _MAX_UNITS:
        lines.append(f"  and {len(worst) - _MAX_UNITS} units with less")
    return lines


def _parts(parts: TimeParts) -> str:
    return (
        f"{parts.total / _MS:.3f} ms = {parts.compute_only / _MS:.3f} compute only"
        f" + {parts.overlapped / _MS:.3f} overlapped"
        f" + {parts.exposed_communication / _MS:.3f} exposed communication"
        f" + {parts.idle / _MS:.3f} idle"
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
