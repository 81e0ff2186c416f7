"""The configurations that are recommended: the best of torch's FSDPs and the best of ours, as far as both
ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpbench.reports.pages.ranking import Ranked
from fsdpbench.reports.pages.view import Configuration

OURS_RAN_ON_GPUS = False
"""Whether `ci/measured` holds a run of ours on GPUs; a test holds it to that folder."""
_NOT_YET = "ours has not run on GPUs yet"


@dataclass(frozen=True)
class Chosen:
    """The recommended rows, of torch's FSDPs and of ours: each None where no such system ran, or both."""

    torchs: Ranked | None
    ours: Ranked | None

    @property
    def both(self) -> bool:
        return self.torchs is not None and self.ours is not None


def chosen(ranked: Sequence[Ranked]) -> Chosen:
    """Return the first of each in the ranking; of equally fast ones (one rank) one that is not risky."""
    return Chosen(_best(ranked, "torch-fsdp"), _best(ranked, "impl-"))


def doubt(row: Configuration) -> str:
    """Return a warning about a row, as words in brackets; empty where there is none."""
    told = []
    if _system(row).startswith("impl-") and not OURS_RAN_ON_GPUS and row.simulated:
        told.append(_NOT_YET)
    if (row.result.alloc_retries_per_step or 0) > 0:
        told.append("risky: the allocator retries")
    elif is_risky(row):
        told.append("risky: its memory fits only inside the prediction's error")
    return f" ({'; '.join(told)})" if told else ""


def is_risky(row: Configuration) -> bool:
    """Return whether its memory fits only inside the prediction's error, or with retries."""
    predicted = row.result.interval is not None and row.result.interval.risky
    return predicted or (row.result.alloc_retries_per_step or 0) > 0


def _best(ranked: Sequence[Ranked], prefix: str) -> Ranked | None:
    own = [entry for entry in ranked if entry.throughput and _system(entry.row).startswith(prefix)]
    equal = [entry for entry in own if entry.rank == own[0].rank]
    return next((entry for entry in equal if not is_risky(entry.row)), own[0] if own else None)


def _system(row: Configuration) -> str:
    return str(row.settings.get("system") or "")
