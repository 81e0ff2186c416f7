"""What a decoded trace looks like: columns of integers, one row an event.

A Kineto trace of one rank has about a hundred thousand to some millions of events.  Objects an event would
cost gigabytes, so an event is a row of numpy columns, and names are numbers that index `Trace.names`.
All times are integer nanoseconds on the trace's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

MISSING = -1
"""Stands for "the event does not say" in the columns correlation, stream and device."""


class TraceError(Exception):
    """A file that cannot be read as a trace: `path`, and the `reason` in one line."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = Path(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[TraceError], tuple[Path, str]]:
        # Pickled when a reading process hands its error to its parent: two arguments, not the message.
        return TraceError, (self.path, self.reason)


class Category(IntEnum):
    """The kinds of events that the analysis uses; everything else (flows, Python frames) is not kept. Of
    Python's frames those of modules are."""

    CPU_OP = 1
    USER_ANNOTATION = 2
    GPU_USER_ANNOTATION = 3
    RUNTIME = 4
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    SYNC = 8
    MODULE = 9


@dataclass(frozen=True, eq=False)
class Events:
    """Complete events as columns of equal length.

    start, duration: int64, ns.  category: int8, `Category`.  name: int32, index into `Trace.names`.
    lane: int32, index into `Trace.lanes`.  correlation: int64.  stream, device: int32.
    """

    DTYPES: ClassVar = (np.int64, np.int64, np.int8, np.int32, np.int32, np.int64, np.int32, np.int32)

    start: Int64
    duration: Int64
    category: Int8
    name: Int32
    lane: Int32
    correlation: Int64
    stream: Int32
    device: Int32

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Int64:
        """int64 ns."""
        return self.start + self.duration

    def select(self, rows: Bool | Int64) -> Events:
        """The rows of a mask or of an index array, in its order."""
        return Events(*(column[rows] for column in self.columns()))

    def columns(self) -> tuple[Any, ...]:
        """The arrays, in the order of their declaration (and of `DTYPES`)."""
        return tuple(getattr(self, column.name) for column in fields(self))


@dataclass(frozen=True)
class CollectiveInfo:
    """What the profiler wrote about one collective (elements as counted by NCCL's metadata, a rank).

    group_ranks: the list of the group's ranks as text, shortened for large groups.
    """

    name: str
    in_elements: int | None
    out_elements: int | None
    dtype: str | None
    group_size: int | None
    group_name: str | None
    group_ranks: str | None = None


@dataclass(frozen=True)
class OperatorCall:
    """What an operator was called with (`record_shapes`): for each input its sizes (none for what is not a
    tensor, or has no dimension), its type and, where it is a plain value, its text; all as the file has
    them. strides: of each input, as far as they are known.  moved: bytes, where a fused kernel states them.
    """

    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...] = ()
    moved: int | None = None


@dataclass(frozen=True, eq=False)
class MemoryEvents:
    """Allocations and frees: int64 columns time (ns), bytes (signed), allocated and reserved (totals after
    the event), address, device_type (0 CPU, 1 CUDA, 20 PrivateUse1), device_id, active (the total with what
    other streams still use, MISSING as a rule: only simulated traces tell it)."""

    time: Int64
    bytes: Int64
    allocated: Int64
    reserved: Int64
    address: Int64
    device_type: Int64
    device_id: Int64
    active: Int64

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True, eq=False)
class RetryEvents:
    """Allocator retries: int64 columns time (ns), bytes asked for, bytes freed by the retry."""

    time: Int64
    bytes: Int64
    freed: Int64

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True, eq=False)
class Trace:
    """One rank's trace.

    `collectives` maps a row of `events` to its metadata, `calls` one of an operator whose cost follows from
    its shapes (`trace.shaped`) to them; `lanes` holds (pid, tid) as the file has them;
    `simulated` is the file's "fsdpbench" object or None.  Findings of the decoder, each a line: `problems`
    say what figures may lack or what contradicts itself, `remarks` do no harm.
    """

    path: Path
    events: Events
    names: tuple[str, ...]
    lanes: tuple[tuple[int | str, int | str], ...]
    collectives: dict[int, CollectiveInfo]
    calls: dict[int, OperatorCall]
    memory: MemoryEvents
    retries: RetryEvents
    rank: int | None
    world_size: int | None
    backend: str | None
    devices: tuple[dict[str, Any], ...]
    simulated: dict[str, Any] | None
    problems: tuple[str, ...]
    remarks: tuple[str, ...]

    def rows(self, *categories: Category) -> Int64:
        """Row numbers of the events of these categories, in the file's order."""
        mask = self.events.category == categories[0]
        for category in categories[1:]:
            mask |= self.events.category == category
        return np.flatnonzero(mask)

    def name_of(self, row: int) -> str:
        """The name of the event in this row."""
        return self.names[int(self.events.name[row])]
