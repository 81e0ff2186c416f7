"""The analysis as plain text for a terminal (`text.jinja`)."""

import re
from collections import Counter

from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.reports.analysis.figures import CollectiveFigures
from fsdpbench.reports.analysis.idle import IDLE_WORDS
from fsdpbench.reports.analysis.memory import MemoryAnalysis
from fsdpbench.reports.analysis.model import Analysis, RankAnalysis, RanksSummary

_MS = 1e6
_MIB = 2**20
_MAX_HELD = 6
_WORTH_NS = 1000


def describe(analysis: Analysis) -> str:
    """Return a few lines per rank, then lines about the ranks together."""
    words = {"across": across, "bandwidth": _bandwidth, "count": _count, "held": _held, "idle": _idle}
    figures = {"ms": lambda ns: f"{ns / _MS:.3f}", "mib": lambda size: f"{size / _MIB:.1f}"}
    return rendered_beside(__file__, "text.jinja", analysis=analysis, **words, **figures).rstrip()


def across(name: str, summary: RanksSummary) -> list[str]:
    """Return sentences about the ranks of the configuration `name` together."""
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


def _bandwidth(figures: CollectiveFigures, rank: RankAnalysis) -> str:
    """Return the achieved bus bandwidth against its peak."""
    if figures.bus_bandwidth is None or figures.best_bandwidth is None:
        return ""
    text = f", {figures.bus_bandwidth / 1e9:.2f} GB/s bus bandwidth, best {figures.best_bandwidth / 1e9:.2f}"
    share = f"{100 * (figures.roof_share or 0):.0f} %"
    if figures.roof_bandwidth is not None and rank.links is not None:
        return f"{text}, {share} of {rank.links.name}'s {figures.roof_bandwidth / 1e9:.0f}"
    return f"{text}, {share} of it (the peak of this hardware is not known)"


def _held(memory: MemoryAnalysis) -> list[tuple[str, int]]:
    """Return what is alive at the peak, the largest first, with the units of a phase summed up."""
    held: Counter[str] = Counter()
    for each in memory.at_peak:
        unit = re.sub(r"[0-9]+", "*", each.unit or "no unit")
        held[f"{each.phase or 'outside phases'}, {unit}, {each.event}"] += each.bytes
    if memory.before_trace:
        held["before the trace"] = memory.before_trace
    return held.most_common(_MAX_HELD)


def _idle(rank: RankAnalysis) -> str:
    """Return why the device was idle in a mean step; "" if it hardly was."""
    steps = max(len(rank.steps), 1)
    parts = rank.idle_causes.parts().items()
    return ", ".join(
        f"{ns / steps / _MS:.3f} ms {IDLE_WORDS[name]}" for name, ns in parts if ns >= _WORTH_NS * steps
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
