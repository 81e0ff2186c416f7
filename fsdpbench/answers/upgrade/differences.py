"""Differences between two runs of one script, by cause: the gate's verdict on the figures, and what changed in
a traced step and in memory, largest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fsdpbench.answers.check.compare import Comparison, compare
from fsdpbench.answers.check.records.sides import absent_of, paired
from fsdpbench.answers.check.records.surroundings import require_alike
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.answers.upgrade.runs import Run
from fsdpbench.base.reading import one_line
from fsdpbench.reports.analysis.names import is_copy
from fsdpbench.reports.analysis.naming import CollectiveType, collective_type
from fsdpbench.reports.analysis.trace_diff import Change, diff_ranks
from fsdpbench.reports.result import Result

_LEAST = {"s": 1e-7, "B": 1024.0, "": 0.0}
"""Smaller changes are left out: seconds, bytes, counts."""


class Difference(msgspec.Struct, frozen=True):
    """One thing that differs in a mean step. `cause`: its group; `before`, `after`: seconds (`unit` s), bytes
    (B) or a count; `counts`: how often, on both sides; `detail`: more words."""

    cause: str
    what: str
    unit: str
    before: float
    after: float
    counts: tuple[float, float] | None = None
    detail: str = ""

    @property
    def by(self) -> float:
        """Return after minus before."""
        return self.after - self.before

    def line(self) -> str:
        """Return it as a line of at most 79 columns, if its name is short."""
        if self.unit == "B":
            change = f"{self.by / 2**20:+.2f} MiB"
            sides = f"{self.before / 2**20:,.1f} -> {self.after / 2**20:,.1f} MiB"
        elif self.unit == "s":
            change, sides = (
                f"{self.by * 1e3:+.4f} ms",
                f"{self.before * 1e3:.4f} -> {self.after * 1e3:.4f} ms",
            )
        else:
            change, sides = f"{self.by:+g}", f"{self.before:g} -> {self.after:g}"
        if self.counts is not None:
            sides = f"{self.counts[0]:g} -> {self.counts[1]:g} a step"
        name, _, place = self.what.partition("(")
        return one_line(f"{change:>13}  {self.cause:<13} {name.strip()}: {sides}{self.detail}")


def compared(before: Run, after: Run, thresholds: Thresholds) -> Comparison:
    """Return the gate's comparison. Raises `CannotJudgeError` for sides that cannot be compared."""
    require_alike(before.side.surroundings, after.side.surroundings)
    old, new = paired(before.side, after.side)
    return compare(old, new, thresholds, absent_of(before.side, after.side))


def differences(before: Run, after: Run) -> list[Difference]:
    """Return what differs: times first, then memory, then counts alone, each the largest change first."""
    found = [*_of_script(before.result, after.result), *_of_traces(before, after)]
    kept = [each for each in found if abs(each.by) > _LEAST[each.unit] or _counts_differ(each)]
    return sorted(kept, key=lambda each: (("s", "B", "").index(each.unit), -abs(each.by), each.what))


def _counts_differ(each: Difference) -> bool:
    return each.counts is not None and each.counts[0] != each.counts[1]


def _of_traces(before: Run, after: Run) -> Iterator[Difference]:
    if before.trace is None or after.trace is None:
        return
    diff = diff_ranks(before.trace, after.trace)
    yield _timed("step", "", diff.step)
    for part in (*diff.parts, *diff.phases):
        yield _timed("of the step", part.name.replace("_", " "), part)
    for idle in diff.idle:
        yield _timed("idle", f"because of {idle.name.replace('_', ' ')}", idle)
    host = Change("host", before.trace.drawing, after.trace.drawing)
    yield _timed("host", "operators and launches, CPU time", host)
    for each in diff.names:
        if collective_type(each.name) is CollectiveType.OTHER:
            cause = "copies" if is_copy(each.name) else "kernels"
            yield _timed(cause, each.name, each.time, (each.count.before, each.count.after))
    for kind, changes in diff.collectives.items():
        of = {each.name: each for each in changes}
        counts = of["count"].before, of["count"].after
        moved = of.get("bytes")
        sizes = f", {moved.before / 1e6:,.1f} -> {moved.after / 1e6:,.1f} MB" if moved and moved.by else ""
        yield _timed("collectives", kind.replace("_", "-"), of["time"], counts, sizes)
    for memory in diff.memory:
        yield Difference("memory", memory.name.replace("_", " "), "B", memory.before, memory.after)
    old, new = before.trace.memory, after.trace.memory
    unused = "reserved, not allocated, at the peak", "B", old.unused_at_peak or 0, new.unused_at_peak or 0
    yield Difference("allocator", *unused)
    yield Difference("allocator", "calls of the driver", "", old.allocator_calls, new.allocator_calls)


def _timed(
    cause: str, what: str, change: Change, counts: tuple[float, float] | None = None, detail: str = ""
) -> Difference:
    return Difference(cause, what, "s", change.before / 1e9, change.after / 1e9, counts, detail)


def _of_script(before: Result, after: Result) -> Iterator[Difference]:
    """Yield allocator retries, and the script's lines that wait for the GPU on one side."""
    retries = before.alloc_retries_per_step or 0.0, after.alloc_retries_per_step or 0.0
    yield Difference("allocator", "retries", "", *retries)
    old, new = (
        {f"{each['file']}:{each['line']}": each for each in side.stored("script.observed.waits") or ()}
        for side in (before, after)
    )
    for place in {**old, **new}:
        count = (side[place]["per_step"] if place in side else 0.0 for side in (old, new))
        yield Difference("waits", f"{place}: the CPU waits for the GPU", "", *count)
