"""Kernels that Inductor fused: its names say of what, `triton_poi_fused__to_copy_add_7`.

A name holds how the kernel goes over its data (`poi`), the operators that were fused, sorted,
and a number, which a second graph counts again. Kernels of the same operators are one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpbench.reports.analysis.device.activity import Activity
from fsdpbench.reports.analysis.device.time_units import seconds
from fsdpbench.reports.analysis.device.windows import Window
from fsdpbench.reports.trace import Trace

_FUSED = re.compile(
    r"^(?:triton_(?P<kind>poi|red|per|tem|mix|for)|(?:graph_\d+_)?(?P<cpu>cpp))_fused_?(?P<operators>\w*?)(?:_\d+)?$"
)
_KINDS = {
    "poi": "pointwise",
    "red": "reduction",
    "per": "reduction of whole rows",
    "tem": "matrix product",
    "mix": "reductions that share their input",
    "for": "list of tensors",
    "cpp": "loop on the CPU",
}
_MOVING = re.compile(
    r"(?:_*(?:to_copy|unsafe_view|view|reshape|clone|copy|cat|stack|permute|transpose|t|expand|select|slice|"
    r"split_with_sizes|split|unbind|unsqueeze|squeeze|alias|detach|as_strided))+"
)


@dataclass(frozen=True)
class FusedGroup:
    """Fused kernels of one origin within the steps. `operators`: as Inductor joins their names. `kernels`:
    how many different ones; `count`: launches; `time`: ns."""

    kind: str
    operators: str
    kernels: int
    count: int
    time: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "operators": self.operators,
            "kernels": self.kernels,
            "count": self.count,
            "time_s": seconds(self.time),
        }


def fused_groups(names: Iterable[NameTotal]) -> tuple[FusedGroup, ...]:
    """The groups among what ran, the longest first."""
    found: dict[tuple[str, str], list[NameTotal]] = {}
    for total in names:
        if match := _FUSED.match(total.name):
            kind = _KINDS[match["kind"] or match["cpu"]]
            found.setdefault((kind, match["operators"].strip("_") or "not told"), []).append(total)
    groups = [
        FusedGroup(
            kind,
            operators,
            len(totals),
            sum(each.count for each in totals),
            sum(each.time for each in totals),
        )
        for (kind, operators), totals in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.time, group.operators)))


def moves_only(name: str) -> bool | None:
    """Whether a fused kernel computes nothing, only casts and moves data; None for other names."""
    match = _FUSED.match(name)
    if match is None:
        return None
    return bool(_MOVING.fullmatch(match["operators"])) if match["operators"] else False


@dataclass(frozen=True)
class NameTotal:
    """Kernels, copies and collectives of one name (operators on a CPU trace), over all steps; time in ns.

    The time of operators includes that of operators inside them.
    """

    name: str
    count: int
    time: int


def name_totals(trace: Trace, activity: Activity, windows: Sequence[Window]) -> tuple[NameTotal, ...]:
    """Everything that was launched within the steps, the longest first."""
    work = activity.work
    asked = work.asked()
    starts = np.array([window.mark.start for window in windows], np.int64)
    ends = np.array([window.mark.end for window in windows], np.int64)
    place = np.searchsorted(starts, asked, side="right") - 1
    inside = (place >= 0) & (asked < ends[np.maximum(place, 0)])
    names = trace.events.name[work.row[inside]]
    counts = np.bincount(names, minlength=len(trace.names))
    found, where = np.unique(names, return_inverse=True)
    times = np.zeros(len(found), np.int64)
    np.add.at(times, where, (work.end - work.start)[inside])
    order = np.lexsort((found, -times))
    return tuple(
        NameTotal(trace.names[number], int(counts[number]), int(time))
        for number, time in zip(found[order].tolist(), times[order].tolist(), strict=True)
    )
