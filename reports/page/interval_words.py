"""The interval of a simulated figure in words: for tiles, for the verdict, for findings."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpbench.reports.page.display import gib, milliseconds, percent
from fsdpbench.reports.page.ranking import Ranked
from fsdpbench.reports.run_files import Interval


def plus_minus(interval: Interval) -> str:
    """`±7 %`: half the interval of the step time."""
    return f"±{percent(interval.half_width, 0)}"


def time_words(interval: Interval | None) -> str:
    """The step time's interval behind its unit; nothing where there is none."""
    if interval is None:
        return ""
    low, high = (milliseconds(value) for value in interval.step_time_s)
    return f", {percent(interval.level, 0)}: {low} to {high}"


def reserved_words(interval: Interval | None) -> str:
    """The interval of reserved memory; nothing where there is none."""
    found = None if interval is None else interval.peak_memory_bytes.get("reserved")
    if interval is None or found is None:
        return ""
    return f", {percent(interval.level, 0)}: {gib(found[0])} to {gib(found[1])}"


def interval_findings(ranked: Sequence[Ranked]) -> list[str]:
    """What the intervals say of a run: how wide and why, who shares the first rank, which rows are risky."""
    known = [entry for entry in ranked if entry.throughput and entry.row.result.interval]
    if not known:
        return []
    intervals = [entry.row.result.interval for entry in known]
    best = intervals[0]
    assert best is not None
    low, high = (milliseconds(value) for value in best.step_time_s)
    why = f", wide because: {'; '.join(best.because)}" if best.because else ""
    found = [
        f"The best one's step takes {low} to {high} ms in {percent(best.level, 0)} of cases like it "
        f"({plus_minus(best)}, from held-out errors of {best.runs} published runs{why})."
    ]
    first = [entry for entry in known if entry.rank == 1]
    if len(first) > 1:
        found.append(
            f"The first {len(first)} share rank 1: they are within {percent(best.apart)}, and the simulation "
            "cannot tell them apart."
        )
    risky = [entry for entry in known if entry.row.result.interval and entry.row.result.interval.risky]
    if risky:
        has = "is" if len(risky) == 1 else "are"
        places = ", ".join(str(entry.place) for entry in risky[:8]) + (" …" if len(risky) > 8 else "")
        found.append(
            f"{len(risky)} of {len(known)} {has} risky: memory fits only inside its error, or the allocator "
            f"retries (number {places})."
        )
    return found
