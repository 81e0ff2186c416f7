"""A memory snapshot at its out-of-memory error: what was held, judged by the frames that allocated it.

Only lists, dictionaries, strings and numbers are read of the file (`plain_pickle`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.reports.analysis.measures.snapshot import load_snapshot, own_line, read_snapshot
from fsdpbench.reports.out_of_memory.text import told
from fsdpbench.reports.trace import TraceError, TraceLimits

OPTIMIZER = "optimizer states and temporaries"
GATHERED = "gathered parameters, all-gather buffers"
REDUCED = "reduce-scatter buffers, reduced gradients"
BACKWARD = "allocated in backward (gradients, recomputed activations)"
FORWARD = "activations and others of forward"
OTHER = "others (parameters, inputs)"
BEFORE = "allocated before the history began"
_FILES = {OPTIMIZER: "/torch/optim/", BACKWARD: "/torch/autograd/__init__", FORWARD: "/torch/nn/modules/"}
_FUNCTIONS = (
    (GATHERED, ("all_gather", "unshard", "allgather")),
    (REDUCED, ("reduce_scatter", "post_backward", "reduce_grad")),
)
_PHASES = {OPTIMIZER: "optimizer", BACKWARD: "backward", FORWARD: "forward"}
_MOST = 12


@dataclass(frozen=True)
class SnapshotOom:
    """What a snapshot says about its last out-of-memory error; bytes. None, empty: the history does not say.

    held: by category. lines: by the user's line that allocated, largest first. growth: bytes alive that were
    made in each tenth of the history, oldest first.
    """

    device: int
    asked: int | None
    free: int | None
    phase: str | None
    line: str | None
    allocated: int
    reserved: int
    split: int
    held: dict[str, int]
    lines: tuple[tuple[str, int, int], ...]
    growth: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "device": self.device,
            "asked": self.asked,
            "free": self.free,
            "phase": self.phase,
            "line": self.line,
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "split_bytes": self.split,
            "held_bytes": self.held,
            "lines": [{"line": line, "bytes": size, "count": count} for line, size, count in self.lines],
            "alive_by_age_bytes": list(self.growth),
        }


def read_oom_snapshot(path: Path, limits: TraceLimits | None = None) -> list[SnapshotOom]:
    """One result a device that has memory or history. Raises `TraceError` for a file that is not a
    snapshot."""
    totals = read_snapshot(path, limits)
    histories = list(load_snapshot(path, limits).get("device_traces") or [])
    found = []
    for each in totals:
        history = histories[each.device] if 0 <= each.device < len(histories) else []
        try:
            found.append(_at_oom(each, history))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                path, f"is a damaged memory snapshot ({type(error).__name__}: {error})"
            ) from None
    return found


def _at_oom(totals: Any, history: Sequence[Mapping[str, Any]]) -> SnapshotOom:
    ooms = [index for index, entry in enumerate(history) if entry["action"] == "oom"]
    end = ooms[-1] if ooms else len(history)
    failed = history[end] if ooms else None
    alive: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for index, entry in enumerate(history[:end]):
        if entry["action"] == "alloc":
            alive[int(entry["addr"])] = (index, entry)
        elif entry["action"] == "free_requested":
            alive.pop(int(entry["addr"]), None)
    allocated = int(totals.allocated_curve[end]) if ooms else totals.peak_allocated
    held: dict[str, int] = {}
    lines: dict[str, list[int]] = {}
    ages = [0] * 10
    for index, entry in alive.values():
        size, frames = int(entry["size"]), entry.get("frames") or ()
        category = _category(frames)
        held[category] = held.get(category, 0) + size
        sums = lines.setdefault(own_line(frames), [0, 0])
        sums[0] += size
        sums[1] += 1
        ages[index * 10 // max(end, 1)] += size
    before = allocated - sum(held.values())
    if before > 0:
        held[BEFORE] = before
    frames = () if failed is None else failed.get("frames") or ()
    ordered = sorted(lines.items(), key=lambda item: (-item[1][0], item[0]))[:_MOST]
    return SnapshotOom(
        device=totals.device,
        asked=None if failed is None else int(failed["size"]),
        free=None if failed is None else _free(failed),
        phase=_PHASES.get(_category(frames)) if frames else None,
        line=own_line(frames) if frames else None,
        allocated=allocated,
        reserved=totals.reserved,
        split=totals.split,
        held=dict(sorted(held.items(), key=lambda item: -item[1])),
        lines=tuple((line, size, count) for line, (size, count) in ordered),
        growth=tuple(ages) if alive else (),
    )


def _free(entry: Mapping[str, Any]) -> int | None:
    """torch writes the device's free bytes of an `oom` into `addr` (older) or `device_free`."""
    free = entry.get("device_free", entry.get("addr"))
    return None if free is None else int(free)


def _category(frames: Sequence[Mapping[str, Any]]) -> str:
    """By the frames, innermost first: who called outweighs what was called only for backward."""
    names = [(str(frame.get("filename", "")), str(frame.get("name", ""))) for frame in frames]
    for category, words in _FUNCTIONS:
        if any(word in name for _, name in names for word in words):
            return category
    for category, part in _FILES.items():
        if any(part in file for file, _ in names):
            return category
    return FORWARD if any(name == "forward" for _, name in names) else OTHER


def describe_snapshot(found: SnapshotOom) -> str:
    """Several lines, for people."""
    head = "the history holds no out-of-memory error; the figures are those of its peak"
    if found.asked is not None:
        head = f"{told(found.asked)} asked for"
    lines = [f"GPU {found.device}: {head}", "", f"  {'phase':<12}{found.phase or 'unknown'}"]
    lines += [f"  {'line':<12}{found.line or 'unknown'}", "", "held by"]
    lines += [f"  {what:<58}{told(size):>12}" for what, size in found.held.items()]
    lines += [f"  {'free pieces of segments in use (fragmentation)':<58}{told(found.split):>12}"]
    lines += [f"  {'outside the allocator':<58}{'unknown':>12}"]
    if found.lines:
        lines += ["", "by line"]
        lines += [f"  {told(size):>12}  {count:>6} x  {line}" for line, size, count in found.lines]
    if found.growth and min(found.growth[2:]) > 0.05 * max(sum(found.growth), 1):
        lines += [
            "",
            "Memory of every part of the history is still alive: something grows from step to step.",
        ]
    return "\n".join(lines)
