"""The figures of one run, checked alone and beside each other.

A figure that is broken often still looks like one (a peak of 5 bytes, no all-gather any more); beside the
others it cannot be true, and it is unknown which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdpbench.check.figures import Figure
from fsdpbench.check.metrics import METRICS

_RISING = (
    ("peak_allocated_bytes", "peak_active_bytes"),
    ("peak_active_bytes", "peak_reserved_bytes"),
    ("fastest_step_s", "step_time_s"),
)
"""The first one is part of the second: what is allocated is active, what is active is reserved."""

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_ALMOST_ALL = 0.999
"""Of communication: with less of it hidden, what is exposed is not rounding of a nanosecond."""


def checked(run: Mapping[str, object]) -> dict[str, Figure]:
    """The figures of a run by metric, each checked alone. Where there is no collective of a kind, none of its
    bytes were moved."""
    figures = {name: metric.checked(run.get(name)) for name, metric in METRICS.items()}
    for kind in _KINDS:
        if figures[f"{kind}_count"] == 0 and figures[f"{kind}_bytes"] is None:
            figures[f"{kind}_bytes"] = 0
    return figures


def contradictions(figures: Mapping[str, Figure]) -> dict[str, str]:
    """What speaks against a figure beside the others of its run, by metric."""
    return {name: why for names, why in _contradictions(figures) for name in names}


def communicates(figures: Mapping[str, Figure]) -> bool:
    """Whether the run had any communication that could overlap; also where that is not known."""
    known = (*(f"{kind}_count" for kind in _KINDS), "exposed_communication_s")
    return any(figures[name] != 0 for name in known)


def _contradictions(figures: Mapping[str, Figure]) -> Iterator[tuple[tuple[str, ...], str]]:
    known = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    for part, whole in _RISING:
        if part in known and whole in known and known[part] > known[whole]:
            yield (part, whole), f"{part} is above {whole}, which it is part of"
    for kind in _KINDS:
        count, size = f"{kind}_count", f"{kind}_bytes"
        if count in known and size in known and (known[count] == 0) != (known[size] == 0):
            yield (count, size), f"{count} is {known[count]:g} and {size} is {known[size]:g}"
    for timed in ("prefetched_all_gathers", "late_all_gathers"):
        if known.get("all_gather_count") == 0 and known.get(timed):
            yield ("all_gather_count", timed), f"{timed} is {known[timed]:g} without any all-gather"
    exposed, hidden = known.get("exposed_communication_s"), known.get("overlap_fraction")
    names = ("exposed_communication_s", "overlap_fraction")
    if exposed is not None and hidden is not None:
        if exposed == 0 and hidden < _ALMOST_ALL:
            yield names, f"nothing is exposed, and only {hidden:.4f} of communication overlapped"
        if exposed > 0 and hidden == 1:
            yield names, f"all communication overlapped, and {exposed:g} s are exposed"
