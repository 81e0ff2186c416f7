"""Which configurations several runs share, and how they compare there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fsdpbench.reports.page.display import setting
from fsdpbench.reports.page.ranking import Ranked

_OF_THE_RUN = frozenset({"device", "hardware", "gpus", "gpus_per_node", "gpus_used_per_node", "software"})
"""What may differ between runs that are compared: where they ran, not what."""


@dataclass(frozen=True)
class Shared:
    """One configuration that at least two runs have. entries: of each run, None where it lacks it."""

    entries: tuple[Ranked | None, ...]

    @property
    def known(self) -> Ranked:
        """Any of them, for its name."""
        return next(entry for entry in self.entries if entry is not None)

    def ratio(self, number: int) -> float | None:
        """Throughput of run `number` over that of the first run; None where one has none."""
        first, other = self.entries[0], self.entries[number]
        if first is None or other is None or not first.throughput or not other.throughput:
            return None
        return other.throughput / first.throughput


def shared_configurations(runs: Sequence[Sequence[Ranked]]) -> list[Shared]:
    """Those with equal settings, the largest change against the first run first."""
    by_settings: dict[tuple[tuple[str, str], ...], list[Ranked | None]] = {}
    for number, ranked in enumerate(runs):
        for entry in ranked:
            settings = entry.row.settings.items()
            key = tuple(sorted((name, setting(value)) for name, value in settings if name not in _OF_THE_RUN))
            by_settings.setdefault(key, [None] * len(runs))[number] = entry
    found = [Shared(tuple(each)) for each in by_settings.values() if sum(map(bool, each)) > 1]
    return sorted(found, key=_by_change)


def _by_change(shared: Shared) -> tuple[float, str]:
    ratios = [ratio for number in range(1, len(shared.entries)) if (ratio := shared.ratio(number))]
    return -max((abs(math.log(ratio)) for ratio in ratios), default=0.0), shared.known.row.name


def mean_ratio(shared: Sequence[Shared], number: int) -> tuple[float, float, float, int] | None:
    """Geometric mean, least and greatest ratio of run `number` to the first, and of how many."""
    ratios = [ratio for each in shared if (ratio := each.ratio(number))]
    if not ratios:
        return None
    return math.exp(fmean(map(math.log, ratios))), min(ratios), max(ratios), len(ratios)
