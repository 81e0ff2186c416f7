"""What is in the first screen: code to copy, four tiles, and the one chart that explains the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts.whole_run import Chart, breakdown
from fsdpbench.reports.page.interval_words import plus_minus, reserved_words, time_words
from fsdpbench.reports.page.ranking import Metric, Ranked, reserved
from fsdpbench.reports.page.view import RunView
from fsdpbench.reports.reading import UnreadableError, read_bytes

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
    """The step of the best beside those that it is judged against: the best of each other system, the first
    one tried, and the slowest."""
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
    """The best settings as code, where the sweep left it in its folder, else the command that repeats the
    best."""
    found = []
    for path in sorted(view.folder.glob(_CODE_FILES))[:4]:
        try:
            found.append(Code(path.name, read_bytes(path, _MOST_CODE).decode("utf-8", "replace")))
        except (UnreadableError, OSError):
            continue
    return found + ([Code("run it again", command)] if command else [])


def tiles(ranked: Sequence[Ranked], metric: Metric) -> list[dict[str, str]]:
    """Four figures of the best configuration in large type."""
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
