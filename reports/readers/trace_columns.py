"""Columns from decoded events, in chunks: names and threads become numbers, times become nanoseconds."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from decimal import Decimal
from itertools import compress, islice
from math import prod
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from msgspec import Raw, Struct

from fsdpbench.reports.readers import trace, trace_events

DEVICE_CATEGORIES = (trace.Category.KERNEL, trace.Category.MEMCPY, trace.Category.MEMSET)

SPAN_PREFIXES = ("gloo:", "mpi:", "ucc:", "nccl:")
"""Annotations that torch's process groups write around a collective."""

# Plain integers: enum members are slow to look up and to convert.
_NUMBERS = {name: int(category) for name, category in trace.CATEGORIES.items()}
_MODULE = int(trace.Category.MODULE)
_UNKNOWN = 0
_BROKEN = -2
_BETWEEN = b"\0"

AnyEvent = trace_events.FloatEvent | trace_events.ExactEvent
_Arguments = TypeVar("_Arguments", bound=Struct)


class _GrowingColumns:
    """Columns to which chunks of rows are appended. A list of chunks would be copied once more at the end,
    and would stay between the texts of events, whose memory then could not be given back."""

    def __init__(self, dtypes: Iterable[Any]) -> None:
        self.rows = 0
        self._columns = [np.empty(0, dtype) for dtype in dtypes]

    def append(self, chunk: Sequence[Any]) -> None:
        """Append rows, given as one array per column."""
        end = self.rows + len(chunk[0])
        if end > len(self._columns[0]):
            for place, column in enumerate(self._columns):
                wider = np.empty(max(end, len(column) * 3 // 2), column.dtype)
                wider[: self.rows] = column[: self.rows]
                self._columns[place] = wider
        for column, values in zip(self._columns, chunk, strict=True):
            column[self.rows : end] = values
        self.rows = end

    def finish(self) -> list[Any]:
        """Return the columns."""
        return [column[: self.rows] for column in self._columns]


_Kind = tuple[str, str, str, int | str | None, int | str | None]
"""The fields that many events share: phase, category, name, process and thread."""


class _Kinds(dict[_Kind, int]):
    """Numbers kinds of events in order of first appearance; `columns` returns what events of a kind share."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[int | str | None, int | str | None], int] = {}
        self._new: list[tuple[int, ...]] = []
        self._columns = _GrowingColumns((np.int8, np.bool_, np.int32, np.int32, np.bool_))

    def __missing__(self, kind: _Kind) -> int:
        phase, of, name, *lane = kind
        category = _NUMBERS.get(of, _MODULE if trace.is_module(of, name) else _UNKNOWN)
        named = lies = trace.MISSING
        is_complete = category != _UNKNOWN and phase == "X"
        if is_complete:
            named = self.names.setdefault(name, len(self.names))
            # The process is part of the lane: two processes may use the same thread numbers.
            lies = self.lanes.setdefault((lane[0], lane[1]), len(self.lanes))
        self._new.append((category, is_complete, named, lies, trace_events.is_shaped(name)))
        number = self[kind] = len(self)
        return number

    def columns(self, events: Sequence[AnyEvent]) -> list[Any]:
        """Return columns: category, whether complete, name and lane of complete ones, whether shaped."""
        kinds = map(self.__getitem__, [(each.ph, each.cat, each.name, each.pid, each.tid) for each in events])
        number = np.fromiter(kinds, np.int32, len(events))
        if self._new:
            self._columns.append([*zip(*self._new, strict=True)])
            self._new.clear()
        return [column[number] for column in self._columns.finish()]


class _Inputs(dict[tuple[bytes, trace_events.Number | None], int]):
    """Numbers the inputs of calls, given as texts and gigabytes, by their content."""

    def __init__(self) -> None:
        self.distinct: dict[trace.OperatorCall, int] = {}

    def __missing__(self, key: tuple[bytes, trace_events.Number | None]) -> int:
        sizes, types, values, strides = key[0].split(_BETWEEN)
        call = trace_events.call_of(
            trace_events.CalledArguments(Raw(sizes), Raw(types), Raw(values), Raw(strides), key[1])
        )
        number = trace.MISSING if (sizes or b"[").startswith((b"[", b"null")) else _BROKEN
        if call.sizes:
            number = self.distinct.setdefault(call, len(self.distinct))
        self[key] = number
        return number


class ColumnBuilder:
    """Collects the events of a file in chunks of any size; `finish` returns the columns of all of them."""

    def __init__(self, all_calls: bool = False) -> None:
        self.seen = 0
        self._all_calls = all_calls
        self._kinds = _Kinds()
        self._columns = _GrowingColumns((*trace.Events.DTYPES, np.bool_, np.bool_))
        self._collectives: dict[int, trace.CollectiveInfo] = {}
        self._inputs = _Inputs()
        self._calls = _GrowingColumns((np.int64, np.int32))
        self._memory = InstantColumns(trace.MemoryEvents)
        self._retries = InstantColumns(trace.RetryEvents)
        self._incomplete = self._uncategorised = self._broken = 0
        self._unknown: Counter[str] = Counter()

    def add(self, events: Sequence[AnyEvent]) -> None:
        """Append a chunk; its events and their texts are not needed afterwards."""
        self.seen += len(events)
        category, chosen, name, lane, shaped = self._kinds.columns(events)
        counting = category != _UNKNOWN
        if not counting.all():
            self._add_others([*compress(events, (~counting).tolist())])
        self._incomplete += int(counting.sum() - chosen.sum())
        complete = events
        if not chosen.all():
            complete = [*compress(events, chosen.tolist())]
            category, name, lane, shaped = (each[chosen] for each in (category, name, lane, shaped))
        if not complete:
            return
        start, has_start = _times(complete, [event.ts for event in complete])
        duration, has_duration = _times(complete, [event.dur for event in complete])
        correlation = np.full(len(complete), trace.MISSING, np.int64)
        stream = np.full(len(complete), trace.MISSING, np.int32)
        device = np.full(len(complete), trace.MISSING, np.int32)
        self._add_calls(complete, category, correlation)
        self._add_device(complete, category, correlation, stream, device)
        self._add_spans(complete, category)
        is_operator = category == trace.Category.CPU_OP
        self._add_operators(complete, is_operator if self._all_calls else is_operator & shaped)
        values = start, duration, category, name, lane, correlation, stream, device
        self._columns.append((*values, has_start, has_duration))

    def finish(self) -> trace.EventColumns:
        """Return all columns, without the events that cannot be placed in time."""
        *found, has_start, has_duration = self._columns.finish()
        columns = trace.Events(*found)
        usable, problems = _usable(columns, has_start, has_duration)
        problems += self._problems(columns)
        dropped = int((trace.of_categories(columns.category, DEVICE_CATEGORIES) & ~usable).sum())
        if dropped:
            problems.append(f"{dropped} device events could not be placed in time")
        on_device = bool(trace.of_categories(columns.category, DEVICE_CATEGORIES).any())
        doubts, remarks = trace.unknown_categories(self._unknown, on_device)
        collectives, (rows, inputs) = self._collectives, self._calls.finish()
        if not usable.all():
            place = np.cumsum(usable) - 1
            collectives = {int(place[row]): info for row, info in collectives.items() if usable[row]}
            rows, inputs = place[rows[usable[rows]]], inputs[usable[rows]]
            columns = columns.select(usable)
        return trace.EventColumns(
            events=columns,
            names=tuple(self._kinds.names),
            lanes=tuple((_lane(pid), _lane(tid)) for pid, tid in self._kinds.lanes),
            collectives=collectives,
            calls=trace.Calls(rows, inputs, tuple(self._inputs.distinct)),
            memory=in_order(trace.MemoryEvents(*self._memory.finish())),
            retries=trace.RetryEvents(*self._retries.finish()),
            problems=(*problems, *doubts),
            remarks=tuple(remarks),
        )

    def _problems(self, columns: trace.Events) -> list[str]:
        """Return lines about other gaps in the figures."""
        unknown = [number for lane, number in self._kinds.lanes.items() if None in lane]
        on_host = ~trace.of_categories(columns.category, DEVICE_CATEGORIES)
        threadless = int((np.isin(columns.lane, unknown) & on_host).sum()) if unknown else 0
        counts = {
            "events of the profiler are not complete ones (ph is not 'X'): left out": self._incomplete,
            "events have no category: left out": self._uncategorised,
            "events have no name": int((columns.name == self._kinds.names.get("", trace.MISSING)).sum()),
            "events on the CPU name no process or thread": threadless,
            "events have arguments that cannot be read, and count as if they had not": self._broken,
            "memory events cannot be read: left out": self._memory.lost + self._retries.lost,
        }
        return [f"{count} {text}" for text, count in counts.items() if count]

    def _add_others(self, events: Sequence[AnyEvent]) -> None:
        complete = [event.cat for event in events if event.ph == "X"]
        self._uncategorised += complete.count("")
        self._unknown.update(complete)
        instants = [event for event in events if event.ph == "i"]
        for name, kept in (("[memory]", self._memory), ("[alloc_retry]", self._retries)):
            chosen = [event for event in instants if event.name == name]
            if chosen:
                time, present = _times(chosen, [event.ts for event in chosen])
                kept.add(time, present, [event.args for event in chosen])

    def _arguments(
        self, events: Sequence[AnyEvent], rows: Sequence[int], kind: type[_Arguments]
    ) -> list[_Arguments]:
        """Return the arguments of the events in these rows; broken ones are counted."""
        arguments, broken = trace_events.decode_arguments([events[row].args for row in rows], kind)
        self._broken += broken
        return arguments

    def _add_calls(self, events: Sequence[AnyEvent], category: Any, correlation: trace.Int64) -> None:
        rows = np.flatnonzero(category == trace.Category.RUNTIME)
        arguments = self._arguments(events, rows.tolist(), trace_events.CallArguments)
        correlation[rows] = integers([each.correlation for each in arguments])

    def _add_device(
        self,
        events: Sequence[AnyEvent],
        category: Any,
        correlation: trace.Int64,
        stream: trace.Int32,
        device: trace.Int32,
    ) -> None:
        rows = np.flatnonzero(trace.of_categories(category, DEVICE_CATEGORIES))
        arguments = self._arguments(events, rows.tolist(), trace_events.DeviceArguments)
        correlation[rows] = integers([each.correlation for each in arguments])
        stream[rows] = _small_ints([each.stream for each in arguments])
        device[rows] = _small_ints([each.device for each in arguments])
        for row, each in zip(rows.tolist(), arguments, strict=True):
            if each.collective is not None:
                self._collectives[self._columns.rows + row] = _described(each.collective, each)

    def _add_operators(self, events: Sequence[AnyEvent], chosen: trace.Bool) -> None:
        rows = np.flatnonzero(chosen)
        keys = [
            # JSON cannot contain the byte 0: joined texts are equal only if each of the parts is.
            (_BETWEEN.join((each.sizes, each.types, each.values, each.strides)), each.gigabytes)
            for each in self._arguments(events, rows.tolist(), trace_events.CalledArguments)
        ]
        inputs = np.fromiter(map(self._inputs.__getitem__, keys), np.int32, len(keys))
        self._broken += int((inputs == _BROKEN).sum())
        known = inputs >= 0
        self._calls.append((self._columns.rows + rows[known], inputs[known]))

    def _add_spans(self, events: Sequence[AnyEvent], category: Any) -> None:
        annotations = np.flatnonzero(category == trace.Category.USER_ANNOTATION).tolist()
        rows = [row for row in annotations if events[row].name.startswith(SPAN_PREFIXES)]
        arguments = self._arguments(events, rows, trace_events.SpanArguments)
        for row, each in zip(rows, arguments, strict=True):
            self._collectives[self._columns.rows + row] = _from_input_shapes(events[row].name, each)


def _times(events: Sequence[AnyEvent], times: Sequence[Any]) -> tuple[trace.Int64, trace.Bool]:
    return (
        from_digits(times)
        if events and isinstance(events[0], trace_events.ExactEvent)
        else from_floats(times)
    )


def _small_ints(values: Sequence[int]) -> trace.Int32:
    """Return an int32 column; values that do not fit are MISSING (CUPTI writes 2^32-1 for no stream)."""
    wide = integers(values)
    return np.where(np.abs(wide) < 2**31, wide, trace.MISSING).astype(np.int32)


def _usable(
    columns: trace.Events, has_start: trace.Bool, has_duration: trace.Bool
) -> tuple[trace.Bool, list[str]]:
    """Return a mask of the events that can be placed in time, and lines about errors in the others."""
    problems: list[str] = []
    usable = has_start.copy()
    negative = has_start & (columns.duration < 0)
    lengthless = has_start & ~has_duration
    zero = has_start & (columns.start <= 0)
    later = columns.start[has_start & (columns.start > 0)]
    # A trace may well begin at 0; an event at 0 is wrong if (nearly) all other events are much later.
    if zero.any() and len(later):
        low, high = np.percentile(later, [10, 90])
        zero &= bool(low > high - low)
    else:
        zero[:] = False
    for mask, text in (
        (~has_start, "no time stamp"),
        (lengthless, "no duration"),
        (negative, "a negative duration"),
        (zero, "the time stamp 0"),
    ):
        count = int(mask.sum())
        if count:
            problems.append(f"{count} {'event has' if count == 1 else 'events have'} {text}: left out")
            usable &= ~mask
    return usable, problems


def _described(name: str, arguments: trace_events.DeviceArguments) -> trace.CollectiveInfo:
    return trace.CollectiveInfo(
        name=name,
        in_elements=_whole(arguments.in_elements),
        out_elements=_whole(arguments.out_elements),
        dtype=arguments.dtype,
        group_size=_group_size(arguments.group_size),
        group_name=arguments.group_name,
        group_ranks=arguments.group_ranks,
    )


def _from_input_shapes(name: str, arguments: trace_events.SpanArguments) -> trace.CollectiveInfo:
    """Return a gloo span's metadata: only the shapes of its inputs are known; a scalar has the shape []."""
    elements = dtype = None
    try:
        if arguments.input_dims:
            elements = sum(prod(int(size) for size in shape) for shape in arguments.input_dims)
        if arguments.input_types:
            dtype = trace.dtype_from_input_type(str(arguments.input_types[0]))
    except (TypeError, ValueError):
        elements = None
    return trace.CollectiveInfo(name, elements, None, dtype, None, None)


def _whole(number: trace_events.Number | None) -> int | None:
    """Return a count or size; None if the number is neither."""
    return int(number) if number is not None and 0 <= number < 2.0**62 else None


def _group_size(number: trace_events.Number | None) -> int | None:
    """Return the number of ranks; None beyond a million, which no job has."""
    size = _whole(number)
    return size if size and size <= 1 << 20 else None


def _lane(number: int | str | None) -> int | str:
    return "unknown" if number is None else number


class InstantColumns:
    """Collects instants in chunks; `finish` returns the columns of `kind` in order of time."""

    def __init__(self, kind: type[trace.MemoryEvents] | type[trace.RetryEvents]) -> None:
        self.lost = 0
        names = [each.name for each in fields(kind) if each.name != "time"]
        self._values = attrgetter(*names)
        self._columns = _GrowingColumns([np.int64] * (1 + len(names)))

    def add(self, time: trace.Int64, present: trace.Bool, arguments: Sequence[Raw]) -> None:
        """Append the instants that have a time and readable arguments."""
        decoded, broken = trace_events.decode_arguments(arguments, trace_events.MemoryArguments)
        if broken:
            one_by_one = [
                trace_events.decode_arguments([each], trace_events.MemoryArguments)[1] == 0
                for each in arguments
            ]
            present = present & np.array(one_by_one, np.bool_)
        self.lost += int((~present).sum())
        if not present.all():
            time = time[present]
            decoded = [each for each, there in zip(decoded, present.tolist(), strict=True) if there]
        if decoded:
            columns = map(integers, zip(*map(self._values, decoded), strict=True))
            self._columns.append([time, *columns])

    def finish(self) -> list[trace.Int64]:
        columns = self._columns.finish()
        order = np.argsort(columns[0], kind="stable")
        return [column[order] for column in columns]


def integers(values: Sequence[trace_events.Number]) -> trace.Int64:
    """Return an int64 column; values that do not fit are MISSING."""
    try:
        return np.array(values, np.int64)
    except (OverflowError, ValueError):
        fitting = [int(each) if -(2.0**62) < each < 2.0**62 else trace.MISSING for each in values]
        return np.array(fitting, np.int64)


LARGEST_EXACT_MICROSECONDS = 2.0**43
"""Up to this a double distinguishes neighboring nanoseconds (its steps are at most 0.001 us)."""
LARGEST_MICROSECONDS = 2.0**52
"""Longer times and durations (142 years) are invalid; the sum of two fits into int64 nanoseconds."""


_WITH_DECIMALS = re.compile(rb'"ts"\s*:\s*\d+\.\d')
_SAMPLE = 16


def needs_digits(times: Iterable[float | None], text: bytes) -> bool:
    """Return whether times decoded from this text have decimals that a double cannot represent.

    The times of a trace are close together, so a few of them show the magnitude of all.
    """
    some = max(islice((time for time in times if time), _SAMPLE), default=0.0)
    return some > LARGEST_EXACT_MICROSECONDS and _WITH_DECIMALS.search(text) is not None


def from_floats(times: Sequence[float | None]) -> tuple[trace.Int64, trace.Bool]:
    """Return times in int64 ns (0 if missing), and a mask of those present."""
    microseconds = np.array(times, np.float64)  # None becomes nan
    present = np.abs(microseconds) < LARGEST_MICROSECONDS
    if not present.all():
        microseconds = np.where(present, microseconds, 0.0)
    whole = np.floor(microseconds)
    # Split into whole and fraction, the product cannot round: only the fraction is scaled.
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64), present


def from_digits(times: Sequence[Decimal | None]) -> tuple[trace.Int64, trace.Bool]:
    """Return times in int64 ns (0 if missing), and a mask of those present, if doubles are too coarse."""
    known = [time if time is not None and abs(time) < LARGEST_MICROSECONDS else None for time in times]
    ns = np.array([int((time or 0) * 1000) for time in known], np.int64)
    return ns, np.array([time is not None for time in known], np.bool_)


# Allocations and frees with the same time are ordered by the totals after them:
#
#     time  bytes  total after     |  the total before an event (after less bytes) is the total after the
#     5 ms   +512          512     |  previous event, so that the three of 7 ms have a single possible order
#     7 ms   +256         1024  3. |
#     7 ms  +1024         1536  1. |
#     7 ms   -768          768  2. |
#
# A file may have them in any order; if their totals do not determine one, the file's order stays.

_MOST = 40
_TRIED_AN_EVENT = 2
_TRIED_AT_LEAST = 2000

_Event = tuple[int, int, int, int]
"""Row, bytes, total after the event, address."""


def in_order(memory: trace.MemoryEvents) -> trace.MemoryEvents:
    """Return the events, which are sorted by time, with events of one time and device in order as well."""
    order = np.arange(len(memory))
    rows = np.lexsort((memory.device_id, memory.device_type))
    search = _Search(memory)
    for low, high, begins in _out_of_order(memory, rows):
        before = None if begins else int(memory.allocated[order[rows[low - 1]]])
        found = search.order(rows[low:high], before)
        if found:
            order[rows[low:high]] = found
    return memory.select(order)


def _out_of_order(memory: trace.MemoryEvents, rows: trace.Int64) -> Iterator[tuple[int, int, bool]]:
    """Yield stretches [low, high) of `rows` with one device and time in which an event does not continue from
    the total before it; and whether the stretch is the device's first."""
    kind, device, time = memory.device_type[rows], memory.device_id[rows], memory.time[rows]
    of_another = np.append(True, (kind[1:] != kind[:-1]) | (device[1:] != device[:-1]))[: len(rows)]
    begins = np.flatnonzero(of_another | np.append(True, time[1:] != time[:-1])[: len(rows)])
    ends = np.append(begins[1:], len(rows))
    after = memory.allocated[rows]
    broken = ~of_another
    broken[1:] &= after[1:] - memory.bytes[rows][1:] != after[:-1]
    chosen = (ends - begins > 1) & (ends - begins <= _MOST)
    for low, high in zip(begins[chosen].tolist(), ends[chosen].tolist(), strict=True):
        if broken[low:high].any():
            yield low, high, bool(of_another[low])


class _Search:
    """Finds orders of a few events in which each continues from the total of the one before."""

    def __init__(self, memory: trace.MemoryEvents) -> None:
        self._memory = memory
        self._left = _TRIED_AN_EVENT * len(memory) + _TRIED_AT_LEAST

    def order(self, rows: trace.Int64, before: int | None) -> list[int] | None:
        """Return the rows in order, from the total `before`; None if none exists or the search is slow."""
        memory = self._memory
        columns = (rows, memory.bytes[rows], memory.allocated[rows], memory.address[rows])
        # Sorted by themselves, so that the result does not depend on the file's order.
        events = sorted(zip(*(column.tolist() for column in columns), strict=True), key=lambda each: each[1:])
        begins = [before] if before is not None else sorted({after - size for _, size, after, _ in events})
        return next(filter(None, (self._from(total, events, {}) for total in begins)), None)

    def _from(self, total: int, events: list[_Event], alive: dict[int, bool]) -> list[int] | None:
        if not events:
            return []
        for place, (row, size, after, address) in enumerate(events):
            # A live address is not allocated again, and a freed one is not freed again.
            if after - size != total or alive.get(address) is (size > 0) or not self._left:
                continue
            self._left -= 1
            rest = self._from(after, events[:place] + events[place + 1 :], {**alive, address: size > 0})
            if rest is not None:
                return [row, *rest]
        return None
