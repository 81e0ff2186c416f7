"""The first screen: code to copy, four tiles, and the one chart that explains the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpbench.base.reading import UnreadableError, read_bytes
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import gib, milliseconds, percent
from fsdpbench.reports.pages.ranking import Metric, Ranked, reserved
from fsdpbench.reports.pages.view import RunView
from fsdpbench.reports.pages.whole_run import Chart, breakdown
from fsdpbench.reports.result import Interval

MOST_BARS = 7
_MOST_CODE = 20_000
_CODE_FILES = "best_*.py"
_TILES = 4


@dataclass(frozen=True, slots=True)
class Code:
    """Text to copy, and what it is."""

    name: str
    text: str


def overview_chart(
    view: RunView, ranked: Sequence[Ranked], varying: Sequence[str], metric: Metric
) -> Chart | None:
    """Return the step of the best beside those that it is judged against: the best of each other system, the
    first one tried, and the slowest."""
    timed = [entry for entry in ranked if entry.throughput and entry.row.result.time_s]
    if not timed:
        return None
    systems: dict[str, Ranked] = {}
    for entry in timed:
        systems.setdefault(str(entry.row.settings.get("system")), entry)
    chosen = [timed[0], *systems.values()][: MOST_BARS - 2]
    chosen += [entry for entry in timed if entry.row.folder.name == view.first_point] + [timed[-1]]
    places = {entry.place for entry in chosen}
    chart = breakdown([entry for entry in timed if entry.place in places], varying, metric)
    if chart is None:
        return None
    return replace(chart, name="overview", layout=chart.layout | {"height": 112 + 24 * len(places)})


def code_to_copy(view: RunView, command: str | None) -> list[Code]:
    """Return the best settings as code, if the sweep left it in its folder, else the command of the best."""
    found = []
    for path in sorted(view.folder.glob(_CODE_FILES))[:4]:
        try:
            found.append(Code(path.name, read_bytes(path, _MOST_CODE).decode("utf-8", "replace")))
        except (UnreadableError, OSError):
            continue
    return found + ([Code("run it again", command)] if command else [])


def tiles(ranked: Sequence[Ranked], metric: Metric) -> list[dict[str, str]]:
    """Return four figures of the best configuration in large type."""
    if not ranked or not ranked[0].throughput:
        return []
    best = ranked[0].row.result
    capacity = ranked[0].row.capacity_bytes
    error, memory = time_words(best.interval), reserved_words(best.interval)
    found = [
        (
            "Best throughput",
            display.number(ranked[0].throughput, 4),
            f"{metric.words}{f', {plus_minus(best.interval)}' if best.interval else ''}",
        ),
        ("Step time", display.milliseconds(best.step_time_s), f"ms{error}"),
        (
            "Reserved",
            display.gib(reserved(ranked[0].row)),
            (f"of {display.gib(capacity)} GiB" if capacity else "GiB") + memory,
        ),
        ("MFU", display.percent(best.mfu), _rate(best.tflops_per_gpu, metric.each)),
        ("Model TFLOPS", display.number(best.tflops_per_gpu), f"per {metric.each}"),
        ("Overlap", display.percent(best.overlap_fraction), "of communication"),
        ("Allocator retries", display.count(best.alloc_retries_per_step), "a step"),
    ]
    known = [tile for tile in found if tile[1] != display.NOTHING]
    return [{"name": name, "value": value, "unit": unit} for name, value, unit in known[:_TILES]]


def _rate(tflops: float | None, each: str) -> str:
    return "" if tflops is None else f"{display.number(tflops)} TFLOPS per {each}"


def plus_minus(interval: Interval) -> str:
    """Return `±7 %`: half the interval of the step time."""
    return f"±{percent(interval.half_width, 0)}"


def time_words(interval: Interval | None) -> str:
    """Return the step time's interval behind its unit; empty where there is none."""
    if interval is None:
        return ""
    low, high = (milliseconds(value) for value in interval.step_time_s)
    return f", {percent(interval.level, 0)}: {low} to {high}"


def reserved_words(interval: Interval | None) -> str:
    """Return the interval of reserved memory; empty where there is none."""
    found = None if interval is None else interval.peak_memory_bytes.get("reserved")
    if interval is None or found is None:
        return ""
    return f", {percent(interval.level, 0)}: {gib(found[0])} to {gib(found[1])}"


def interval_findings(ranked: Sequence[Ranked]) -> list[str]:
    """Return sentences on intervals: how wide and why, who shares the first rank, which rows are risky."""
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
