"""The first screen: code to copy, and the one chart that explains the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpbench.base.reading import UnreadableError, read_bytes
from fsdpbench.reports.pages.display import percent
from fsdpbench.reports.pages.ranking import Metric, Ranked, varying_settings
from fsdpbench.reports.pages.view import RunView
from fsdpbench.reports.pages.whole_run import Chart, breakdown
from fsdpbench.reports.result import Interval

MOST_BARS = 7
_MOST_CODE = 20_000


@dataclass(frozen=True, slots=True)
class Code:
    """Text to copy, and what it is."""

    name: str
    text: str


def overview_chart(view: RunView, ranked: Sequence[Ranked], metric: Metric) -> Chart | None:
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
    shown = [entry for entry in timed if entry.place in places]
    chart = breakdown(shown, varying_settings([entry.row for entry in shown]), metric)
    if chart is None:
        return None
    return replace(chart, name="overview", layout=chart.layout | {"height": 112 + 24 * len(places)})


def code_to_copy(view: RunView, command: str | None) -> list[Code]:
    """Return the best settings as code, if the sweep left it in its folder, else the command of the best."""
    found = []
    for path in sorted(view.folder.glob("best_*.py"), reverse=True)[:4]:  # torch's before ours
        try:
            found.append(Code(path.name, read_bytes(path, _MOST_CODE).decode("utf-8", "replace")))
        except (UnreadableError, OSError):
            continue
    return found + ([Code("run it again", command)] if command else [])


def plus_minus(interval: Interval) -> str:
    """Return `±7 %`: half the interval of the step time."""
    return f"±{percent(interval.half_width, 0)}"


def interval_findings(ranked: Sequence[Ranked]) -> list[str]:
    """Return a sentence on rows whose memory is risky."""
    known = [
        (entry.place, each) for entry in ranked if entry.throughput and (each := entry.row.result.interval)
    ]
    risky = [place for place, interval in known if interval.risky]
    if not risky:
        return []
    places = ", ".join(map(str, risky[:8])) + (" …" if len(risky) > 8 else "")
    return [
        f"{len(risky)} of {len(known)} {'is' if len(risky) == 1 else 'are'} risky: memory fits only inside "
        f"its error, or the allocator retries (number {places})."
    ]
