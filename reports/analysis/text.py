"""The analysis as plain text for a terminal."""

from __future__ import annotations

from reports.analysis.model import Analysis, RankAnalysis, TimeParts
from reports.analysis.snapshot import SnapshotAnalysis

_MS = 1e6
_MAX_UNITS = 12


def describe(analysis: Analysis) -> str:
    """A few lines a rank, then what the ranks say together."""
    lines: list[str] = []
    for rank in analysis.ranks:
        lines += [*_rank(rank), ""]
    for name, summary in analysis.configurations.items():
        if len(summary.ranks) > 1:
            step = summary.figures["step_time_s"]
            lines.append(
                f"{name + ': ' if name else ''}{len(summary.ranks)} ranks, step {1e3 * step.least:.3f} to "
                f"{1e3 * step.greatest:.3f} ms, slowest rank {summary.slowest_rank}"
            )
        if summary.waiting is not None and summary.waiting.straggler is not None:
            straggler = summary.waiting.straggler
            caused = 100 * summary.waiting.caused[straggler]
            lines.append(f"rank {straggler} is the last to join and causes {caused:.0f} % of the waiting")
        lines += [f"note: {warning}" for warning in summary.warnings]
    for snapshot in analysis.snapshots:
        lines += [*_snapshot(snapshot), ""]
    lines += [f"left out: {problem.path}: {problem.reason}" for problem in analysis.problems]
    return "\n".join(lines).rstrip()


def _rank(rank: RankAnalysis) -> list[str]:
    simulated = ", simulated" if rank.simulated else ""
    place = f"{rank.configuration}, " if rank.configuration else ""
    steps = _count(len(rank.steps), "step")
    lines = [
        f"{place}rank {rank.rank} ({rank.kind} trace{simulated}, {steps}): {rank.path}",
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
    for name, figures in sorted(rank.communication.items()):
        size = "" if figures.bytes is None else f", {figures.bytes / 1e6:.1f} MB"
        speed = ""
        if figures.bus_bandwidth is not None and figures.best_bandwidth is not None:
            best = figures.best_bandwidth / 1e9
            speed = f", {figures.bus_bandwidth / 1e9:.2f} GB/s bus bandwidth (best {best:.2f})"
        lines.append(
            f"  {name:<16}{figures.count} x, {figures.time / _MS:.3f} ms, "
            f"{figures.exposed / _MS:.3f} ms exposed{size}{speed}"
        )
    lines += _units(rank)
    if rank.memory.peak_allocated is not None:
        reserved = rank.memory.peak_reserved
        lines.append(
            f"  peak memory     {rank.memory.peak_allocated / 2**20:.1f} MiB allocated"
            + (f", {reserved / 2**20:.1f} MiB reserved" if reserved else "")
            + (
                f", {_count(len(rank.memory.retries), 'allocator retry', 'allocator retries')}"
                if reserved
                else ""
            )
        )
    return lines


def _snapshot(snapshot: SnapshotAnalysis) -> list[str]:
    mib = 2**20
    peak = (snapshot.peak_allocated, snapshot.peak_active, snapshot.peak_reserved)
    end = (snapshot.allocated, snapshot.active, snapshot.reserved)
    told = "{:.1f} MiB allocated, {:.1f} active, {:.1f} reserved"
    lines = [
        f"memory snapshot, device {snapshot.device}: {snapshot.path}",
        "  peak  " + told.format(*(each / mib for each in peak)),
        "  end   " + told.format(*(each / mib for each in end)),
        f"        {snapshot.split / mib:.1f} MiB free in segments partly in use, largest free block "
        f"{snapshot.largest_free / mib:.1f}, {snapshot.rounding / mib:.1f} by rounding up",
    ]
    lines += [f"  out of memory: {size / mib:.1f} MiB were asked for" for size in snapshot.ooms]
    for held in snapshot.holders[:_MAX_UNITS]:
        lines.append(f"  at the peak  {held.bytes / mib:10.1f} MiB  {held.where}")
    return lines


def _units(rank: RankAnalysis) -> list[str]:
    """The units with most exposed communication."""
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
