"""Memory snapshots of CUDA's caching allocator, as `torch.cuda.memory._dump_snapshot(file)` writes them.

A snapshot is a pickle of plain lists, dictionaries, strings and numbers (torch/cuda/memory.py documents
them): the segments at the end and, if history was recorded, every earlier action of the allocator.
The totals at the end are known, so the curves are computed backwards from there:

    actions   alloc 5   alloc 3   free 5   | end: segments hold 9
    totals         11       14        9    |      (6 were there before the history began)

Unpickling creates only plain values, so that a file from elsewhere cannot run code.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdpbench.base.errors import error_text
from fsdpbench.base.reading import JsonObject, load_plain
from fsdpbench.reports.readers import TraceError, TraceLimits
from fsdpbench.reports.readers.trace import Int64, bytes_text
from fsdpbench.reports.readers.trace_text import open_file

SUFFIXES = (".pickle", ".pkl")

_ALLOCATED = {"alloc": 1, "free_requested": -1}
_ACTIVE = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_MOST_HOLDERS = 20
_MOST_BYTES = 1 << 50
BEFORE_HISTORY = "allocated before the history began"


@dataclass(frozen=True)
class Holder:
    """Bytes alive at the peak that one line of the program allocated ("file:line function")."""

    where: str
    bytes: int
    count: int


@dataclass(frozen=True, eq=False)
class SnapshotAnalysis:
    """One device's memory; bytes.

    allocated, active, reserved: at the end; peaks: of the history, or at the end without one.
    rounding: bytes allocated beyond the requested sizes.  split: free bytes in segments that are partly in
    use, which cannot be returned to the device (fragmentation).  largest_free: the largest free block.
    holders: what was alive at the peak of `allocated`, by the line that allocated it, largest first.
    ooms: bytes requested, for each failure.  allocated_curve: bytes over the history, int64.
    """

    path: Path
    device: int
    allocated: int
    active: int
    reserved: int
    peak_allocated: int
    peak_active: int
    peak_reserved: int
    rounding: int
    split: int
    largest_free: int
    holders: tuple[Holder, ...]
    ooms: tuple[int, ...]
    allocated_curve: Int64

    def to_dict(self) -> dict[str, object]:
        """Return plain values, without the curve."""
        kinds = ("allocated", "active", "reserved")
        return {
            "file": str(self.path),
            "device": self.device,
            "end_bytes": {kind: getattr(self, kind) for kind in kinds},
            "peak_bytes": {kind: getattr(self, f"peak_{kind}") for kind in kinds},
            **{f"{name}_bytes": getattr(self, name) for name in ("rounding", "split", "largest_free")},
            "at_peak": [asdict(holder) for holder in self.holders],
            "ooms": list(self.ooms),
        }


def read_snapshot(path: Path | str, limits: TraceLimits | None = None) -> list[SnapshotAnalysis]:
    """Read and analyze a snapshot file; return one result for each device that has memory or history.

    Args:
        limits: limits on the file, as for `read_trace`; its size must not exceed `unpacked`.

    Raises:
        TraceError: the file cannot be read, is not a snapshot (a pickle of plain values), or is too large.
    """
    path = Path(path)
    document = load_snapshot(path, limits)
    try:
        histories = list(document.get("device_traces") or [])
        devices = {int(segment.get("device", 0)) for segment in document["segments"]}
        devices |= {number for number, history in enumerate(histories) if history}
        return [
            _analyze(
                path,
                device,
                [segment for segment in document["segments"] if int(segment.get("device", 0)) == device],
                histories[device] if 0 <= device < len(histories) else [],
            )
            for device in sorted(devices)
        ]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        text = f"{type(error).__name__}: {error}"[:200]
        raise TraceError(path, f"is a damaged memory snapshot ({text})") from None


def load_snapshot(path: Path, limits: TraceLimits | None = None) -> JsonObject:
    """Return the plain values of a snapshot file: `segments`, and `device_traces` if it has a history.

    Raises:
        TraceError: as `read_snapshot`.
    """
    try:
        limits = limits or TraceLimits.from_environment()
        size = path.stat().st_size
        if size > limits.unpacked:
            raise TraceError(path, limits.refusal("unpacked", f"has {bytes_text(size)}"))
        with open_file(path) as file:
            document = load_plain(file, size)
    except TraceError:
        raise
    except MemoryError:
        raise TraceError(path, error_text("snapshots.too_large")) from None
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})") from None
    except EOFError:
        raise TraceError(path, "is truncated or empty: the pickle ends in the middle") from None
    except Exception as error:  # damaged pickles raise nearly anything
        raise TraceError(path, f"is not a memory snapshot ({str(error)[:200]})") from None
    if not isinstance(document, dict) or not isinstance(document.get("segments"), list):
        raise TraceError(path, "is a pickle, but not a memory snapshot: it has no list 'segments'")
    return document


def _analyze(
    path: Path, device: int, segments: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]
) -> SnapshotAnalysis:
    blocks = [(segment, block) for segment in segments for block in segment["blocks"]]
    used = [block for _, block in blocks if block["state"] == "active_allocated"]
    free = [(segment, block) for segment, block in blocks if block["state"] == "inactive"]
    kinds = ("allocated_size", "active_size", "total_size")
    allocated, active, reserved = (sum(_size(each[kind]) for each in segments) for kind in kinds)
    if max(allocated, active) > reserved:
        raise ValueError(f"{max(allocated, active)} bytes are in use, and only {reserved} reserved")
    allocated_curve = _curve(history, _ALLOCATED, allocated)
    active_curve = _curve(history, _ACTIVE, active)
    reserved_curve = _curve(history, _RESERVED, reserved)
    peak_allocated = int(allocated_curve.max(initial=allocated))
    return SnapshotAnalysis(
        path=path,
        device=device,
        allocated=allocated,
        active=active,
        reserved=reserved,
        peak_allocated=peak_allocated,
        peak_active=int(active_curve.max(initial=active)),
        peak_reserved=int(reserved_curve.max(initial=reserved)),
        rounding=sum(
            _size(block["size"]) - _size(block.get("requested_size") or block["size"]) for block in used
        ),
        split=sum(_size(block["size"]) for segment, block in free if _size(segment["active_size"]) > 0),
        largest_free=max((_size(block["size"]) for _, block in free), default=0),
        holders=_holders(history, allocated_curve, peak_allocated),
        ooms=tuple(_size(entry["size"]) for entry in history if entry["action"] == "oom"),
        allocated_curve=allocated_curve,
    )


def _size(value: Any) -> int:
    """Return bytes. Raises ValueError if the value cannot be a size."""
    size = int(value)
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{str(size)[:40]} bytes cannot be")
    return size


def _curve(history: Sequence[Mapping[str, Any]], signs: Mapping[str, int], end: int) -> Int64:
    """Return the total (bytes) after each action, from the total at the `end`."""
    changes = np.array(
        [signs.get(entry["action"], 0) * _size(entry.get("size") or 0) for entry in history], np.int64
    )
    after: Int64 = end - (changes[::-1].cumsum()[::-1] - changes)
    return after


def alive_after(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the allocations that are alive after these actions, each with its index among them."""
    alive: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for index, entry in enumerate(history):
        if entry["action"] == "alloc":
            alive[int(entry["addr"])] = (index, entry)
        elif entry["action"] == "free_requested":
            alive.pop(int(entry["addr"]), None)
    return list(alive.values())


def holders_of(alive: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Holder]:
    """Return the lines that made these allocations, largest first; a history may lack frames."""
    sizes: dict[str, list[int]] = {}
    for _, entry in alive:
        sizes.setdefault(own_line(entry.get("frames") or ()), []).append(_size(entry["size"]))
    found = (Holder(where, sum(each), len(each)) for where, each in sizes.items())
    return sorted(found, key=lambda holder: (-holder.bytes, holder.where))


def _holders(history: Sequence[Mapping[str, Any]], curve: Int64, peak: int) -> tuple[Holder, ...]:
    """Return the lines that allocated the bytes alive at the peak."""
    if not len(curve):
        return ()
    found = holders_of(alive_after(history[: int(np.argmax(curve)) + 1]))
    before = peak - sum(holder.bytes for holder in found)
    if before > 0:
        found.append(Holder(BEFORE_HISTORY, before, 0))
    return tuple(sorted(found, key=lambda holder: (-holder.bytes, holder.where))[:_MOST_HOLDERS])


def own_line(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost Python frame outside torch, else the innermost frame."""
    first = None
    for frame in frames:
        name = str(frame.get("filename", "?"))
        text = f"{name}:{frame.get('line', 0)} {frame.get('name', '?')}"
        first = first or text
        if name.endswith(".py") and "/torch/" not in name:
            return text
    return first or "no frames were recorded"
