"""From decoded events to columns: names and lanes become numbers, microseconds become integer nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np

from reports.trace.dtypes import dtype_from_input_type
from reports.trace.model import (
    MISSING,
    Bool,
    Category,
    CollectiveInfo,
    Events,
    Int32,
    Int64,
    MemoryEvents,
    RetryEvents,
)
from reports.trace.raw import Arguments, Event, Number

CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "cuda_sync": Category.SYNC,
    # Names of torch 1.8 to 1.11.
    "Operator": Category.CPU_OP,
    "Runtime": Category.RUNTIME,
    "Kernel": Category.KERNEL,
    "Memcpy": Category.MEMCPY,
    "Memset": Category.MEMSET,
}
DEVICE_CATEGORIES = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)

SPAN_PREFIXES = ("gloo:", "mpi:", "ucc:", "nccl:")
"""Annotations that torch's process groups write around a collective."""


@dataclass
class EventColumns:
    """Everything of `Trace` that comes from the list of events; `timed` counts the complete ones."""

    events: Events
    names: tuple[str, ...]
    lanes: tuple[tuple[int | str, int | str], ...]
    collectives: dict[int, CollectiveInfo]
    memory: MemoryEvents
    retries: RetryEvents
    problems: list[str]
    dropped_kernels: int
    timed: int


class _Numbering(dict[Any, int]):
    """Numbers things in order of first sight; a plain dict with `__missing__` is the fastest way to do it."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


def build_columns(events: Sequence[Event]) -> EventColumns:
    """Columns of all complete events of a known category, and of the memory events."""
    category_of = CATEGORIES
    complete = [event for event in events if event.ph == "X" and event.cat in category_of]
    instants = [event for event in events if event.ph == "i" and event.name in ("[memory]", "[alloc_retry]")]
    problems: list[str] = []
    unpaired = sum(event.ph in ("B", "E") for event in events)
    if unpaired:
        problems.append(
            f"{unpaired} begin/end events were left out: only complete events ('ph': 'X') are used"
        )

    start, has_start = _nanoseconds([event.ts for event in complete])
    duration, has_duration = _nanoseconds([event.dur for event in complete])
    category = np.fromiter((category_of[event.cat] for event in complete), np.int8, len(complete))
    names, lanes = _Numbering(), _Numbering()
    # The process is part of the lane: two processes may number their threads alike.
    arguments = [event.args for event in complete]
    columns = Events(
        start=start,
        duration=duration,
        category=category,
        name=_numbered(names, [event.name for event in complete]),
        lane=_numbered(lanes, [(event.pid, event.tid) for event in complete]),
        correlation=np.array([a.correlation for a in arguments], np.int64),
        external=np.array([a.external for a in arguments], np.int64),
        stream=_small_ints([a.stream for a in arguments]),
        device=_small_ints([a.device for a in arguments]),
    )
    usable, found = _usable(columns, has_start, has_duration)
    problems += found
    on_device = np.isin(category, DEVICE_CATEGORIES)
    dropped_kernels = int((on_device & ~usable).sum())
    if not usable.all():
        kept = np.flatnonzero(usable)
        complete = [complete[row] for row in kept]
        columns = columns.select(kept)
    return EventColumns(
        events=columns,
        names=tuple(names),
        lanes=tuple(lanes),
        collectives=_collectives(complete),
        memory=_memory([event for event in instants if event.name == "[memory]"]),
        retries=_retries([event for event in instants if event.name == "[alloc_retry]"]),
        problems=problems,
        dropped_kernels=dropped_kernels,
        timed=len(complete),
    )


def _numbered(numbering: _Numbering, values: Iterable[Any]) -> Int32:
    return np.fromiter(map(numbering.__getitem__, values), np.int32)


def _nanoseconds(times: Sequence[Any]) -> tuple[Int64, Bool]:
    """Integer ns from microseconds, and where there was a time at all (0 stands where there was none)."""
    if times and isinstance(times[0], msgspec.Raw):
        return _nanoseconds_from_digits(times)
    microseconds = np.array(times, np.float64)  # None becomes nan
    present = np.isfinite(microseconds)
    if not present.all():
        microseconds = np.where(present, microseconds, 0.0)
    whole = np.floor(microseconds)
    # Taken apart, the product cannot round: the fraction alone is scaled.
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64), present


def _nanoseconds_from_digits(times: Sequence[Any]) -> tuple[Int64, Bool]:
    present = np.fromiter((time is not None for time in times), np.bool_, len(times))
    return np.fromiter(
        (0 if time is None else _digits_to_ns(bytes(time)) for time in times), np.int64
    ), present


def _digits_to_ns(digits: bytes) -> int:
    whole, _, fraction = digits.partition(b".")
    try:
        if not fraction:
            return int(whole) * 1000
        ns = int(whole.lstrip(b"-") or b"0") * 1000 + int(fraction[:3].ljust(3, b"0"))
    except ValueError:
        return round(float(digits) * 1000)  # an exponent: 1.5e3
    return -ns if whole.startswith(b"-") else ns


def _small_ints(values: Sequence[int | str]) -> Int32:
    """An int32 column; handles of streams ("0x0" in HIP's runtime events) are no stream numbers."""
    try:
        wide = np.array(values, np.int64)
    except (ValueError, TypeError, OverflowError):
        wide = np.fromiter((_int_or_missing(value) for value in values), np.int64, len(values))
    # CUPTI writes 2^32-1 where there is no stream.
    return np.where((wide < -(2**31)) | (wide >= 2**31), MISSING, wide).astype(np.int32)


def _int_or_missing(value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        return MISSING


def _usable(columns: Events, has_start: Bool, has_duration: Bool) -> tuple[Bool, list[str]]:
    """Which events can be placed on the time axis, and what is wrong with the others."""
    problems: list[str] = []
    usable = has_start.copy()
    negative = has_start & (columns.duration < 0)
    lengthless = has_start & ~has_duration
    zero = has_start & (columns.start <= 0)
    later = columns.start[has_start & (columns.start > 0)]
    if zero.any() and len(later):
        # A trace may well begin at 0; an event at 0 is lost when everything else lies far behind.
        zero &= bool(later.min() > later.max() - later.min())
    else:
        zero[:] = False
    for mask, text in (
        (~has_start, "have no time stamp"),
        (lengthless, "have no duration"),
        (negative, "have a negative duration"),
        (zero, "have the time stamp 0"),
    ):
        count = int(mask.sum())
        if count:
            problems.append(f"{count} events {text} and were left out")
            usable &= ~mask
    return usable, problems


def _collectives(events: Sequence[Event]) -> dict[int, CollectiveInfo]:
    """Metadata by row: NCCL kernels carry it themselves; of gloo's spans the input's shape is known."""
    found: dict[int, CollectiveInfo] = {}
    for row, event in enumerate(events):
        arguments = event.args
        if arguments.collective is not None:
            found[row] = CollectiveInfo(
                name=arguments.collective,
                in_elements=_whole(arguments.in_elements),
                out_elements=_whole(arguments.out_elements),
                dtype=arguments.dtype,
                group_size=_whole(arguments.group_size) or None,
                group_name=arguments.group_name,
            )
        elif event.cat == "user_annotation" and event.name.startswith(SPAN_PREFIXES):
            found[row] = _from_input_shapes(event.name, arguments)
    return found


def _from_input_shapes(name: str, arguments: Arguments) -> CollectiveInfo:
    elements = dtype = None
    try:
        shapes = msgspec.json.decode(arguments.input_dims)
        types = msgspec.json.decode(arguments.input_types)
        if shapes:
            elements = sum(prod(int(size) for size in shape) for shape in shapes if shape)
        if types and types[0]:
            dtype = dtype_from_input_type(str(types[0]))
    except (msgspec.DecodeError, TypeError, ValueError):
        pass
    return CollectiveInfo(name, elements, None, dtype, None, None)


def _whole(number: Number | None) -> int | None:
    return None if number is None else int(number)


def _times(events: Sequence[Event]) -> Int64:
    return _nanoseconds([event.ts for event in events])[0]


def _argument_column(
    events: Sequence[Event], of: Callable[[Arguments], Number | None], missing: int = 0
) -> Int64:
    values = (of(event.args) for event in events)
    return np.fromiter((missing if value is None else int(value) for value in values), np.int64, len(events))


def _memory(events: Sequence[Event]) -> MemoryEvents:
    order = np.argsort(_times(events), kind="stable")
    events = [events[row] for row in order]
    return MemoryEvents(
        time=_times(events),
        bytes=_argument_column(events, lambda a: a.bytes_signed),
        allocated=_argument_column(events, lambda a: a.allocated),
        reserved=_argument_column(events, lambda a: a.reserved),
        address=_argument_column(events, lambda a: a.address),
        device_type=_argument_column(events, lambda a: a.device_type).astype(np.int32),
        device_id=_argument_column(events, lambda a: a.device_id, MISSING).astype(np.int32),
    )


def _retries(events: Sequence[Event]) -> RetryEvents:
    order = np.argsort(_times(events), kind="stable")
    events = [events[row] for row in order]
    return RetryEvents(
        time=_times(events),
        bytes=_argument_column(events, lambda a: a.bytes_signed),
        freed=_argument_column(events, lambda a: a.freed),
    )
