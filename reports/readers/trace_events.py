"""The shape of Kineto's JSON, as msgspec structs: events, and their arguments by kind.

Only the fields named here become objects. Arguments stay undecoded text at first (`Raw`): most events'
arguments are never needed.

There are two kinds of events because of numbers.  Most traces count microseconds from a recent base, so that
a double holds nanoseconds exactly; older ones count from 1970 with three decimals, which a double cannot hold
(at 1.7e15 its steps are 0.25).  These times are decimals (`ExactEvent`).
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from fsdpbench.reports.readers.trace import OPERATORS, OperatorCall

ABSENT = Raw(b"")
"""An undecoded field that the file lacks. (`Raw | None` would be decoded like any other value.)"""


class _Event(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    args: Raw = ABSENT


class FloatEvent(_Event, gc=False):
    """An event whose times are doubles, in microseconds."""

    ts: float | None = None
    dur: float | None = None


class KnownEvent(FloatEvent, gc=False, forbid_unknown_fields=True):
    """An event with only the fields that Kineto writes: only its arguments may nest."""

    id: int | str | None = None
    bp: str | None = None
    s: str | None = None


class ExactEvent(_Event, gc=False):
    """An event whose times are decimals, for those that a double cannot hold."""

    ts: Decimal | None = None
    dur: Decimal | None = None


class File(Struct, gc=False):
    """A whole file, or its beginning or end; everything beside the events is small and decoded later."""

    events: list[FloatEvent] | None = field(name="traceEvents", default=None)
    distributed: Raw = field(name="distributedInfo", default=ABSENT)
    devices: Raw = field(name="deviceProperties", default=ABSENT)
    simulated: Raw = field(name="fsdpbench", default=ABSENT)


class ExactFile(Struct, gc=False):
    """A whole file, or its beginning or end, with events of exact times."""

    events: list[ExactEvent] = field(name="traceEvents", default_factory=list)


FILE = Decoder(File)
EXACT_FILE = Decoder(ExactFile)
FLOAT_EVENT = Decoder(FloatEvent)
FLOAT_EVENTS = Decoder(list[FloatEvent])
KNOWN_EVENTS = Decoder(list[KnownEvent])
RAW_EVENTS = Decoder(list[Raw])
EXACT_EVENTS = Decoder(list[ExactEvent])


# The arguments of one kind are joined into one JSON list, so that one call decodes thousands.  If that fails
# (a number given as a string, a list instead of a number), each is decoded on its own, and only a field of
# the wrong type is left out.

Number = int | float


class CallArguments(Struct, frozen=True, gc=False):
    """Arguments of a runtime call, such as a kernel's launch."""

    correlation: int = -1


class DeviceArguments(Struct, frozen=True, gc=False):
    """Arguments of a kernel, a copy or a memory set; NCCL kernels describe their collective."""

    correlation: int = -1
    stream: int = -1
    device: int = -1
    collective: str | None = field(name="Collective name", default=None)
    in_elements: Number | None = field(name="In msg nelems", default=None)
    out_elements: Number | None = field(name="Out msg nelems", default=None)
    group_size: Number | None = field(name="Group size", default=None)
    group_name: str | None = field(name="Process Group Name", default=None)
    group_ranks: str | None = field(name="Process Group Ranks", default=None)
    dtype: str | None = None


class SpanArguments(Struct, frozen=True, gc=False):
    """Arguments of a process group's annotation: shapes and types of its inputs (with `record_shapes`)."""

    input_dims: list[Any] | None = field(name="Input Dims", default=None)
    input_types: list[Any] | None = field(name="Input type", default=None)


class CalledArguments(Struct, frozen=True, gc=False):
    """Arguments of an operator: inputs (with `record_shapes`) as text; bytes that a fused kernel moves."""

    sizes: Raw = field(name="Input Dims", default=ABSENT)
    types: Raw = field(name="Input type", default=ABSENT)
    values: Raw = field(name="Concrete Inputs", default=ABSENT)
    strides: Raw = field(name="Input Strides", default=ABSENT)
    gigabytes: Number | None = field(name="kernel_num_gb", default=None)


class MemoryArguments(Struct, frozen=True, gc=False):
    """Arguments of "[memory]" and "[alloc_retry]" events; numbers are bytes."""

    device_type: int = field(name="Device Type", default=0)
    device_id: int = field(name="Device Id", default=-1)
    address: int = field(name="Addr", default=0)
    bytes: Number = field(name="Bytes", default=0)
    allocated: Number = field(name="Total Allocated", default=0)
    reserved: Number = field(name="Total Reserved", default=0)
    active: Number = field(name="Total Active", default=-1)
    freed: Number = field(name="Freed", default=0)


_Arguments = TypeVar("_Arguments", bound=Struct)

_NOTHING = Raw(b"{}")
_NOT_CONVERTIBLE = (msgspec.DecodeError, OverflowError, ValueError)


def decode_arguments(texts: Sequence[Raw], kind: type[_Arguments]) -> tuple[list[_Arguments], int]:
    """Return one `kind` per text, in order, with defaults for unusable fields; and how many are broken."""
    try:
        return _decode_many(texts, kind), 0
    except _NOT_CONVERTIBLE:
        pass
    try:
        return _decode_many([text if text != ABSENT else _NOTHING for text in texts], kind), 0
    except _NOT_CONVERTIBLE:
        each = [_decode_one(text, kind) for text in texts]
        return [arguments for arguments, _ in each], sum(broken for _, broken in each)


def _decode_many(texts: Sequence[Raw], kind: type[_Arguments]) -> list[_Arguments]:
    """Return all decoded. Raises ValueError if a text is absent: a gap between commas, or an empty list."""
    joined = b"[" + b",".join(texts) + b"]"
    decoded = msgspec.json.decode(joined, type=list[kind])  # type: ignore[valid-type]
    if len(decoded) != len(texts):
        raise ValueError("the only one is absent")
    return decoded


def _decode_one(text: Raw, kind: type[_Arguments]) -> tuple[_Arguments, bool]:
    """Return the arguments, and whether a part of them is broken."""
    values = None
    try:
        values = msgspec.json.decode(text) if text != ABSENT else {}
        return msgspec.convert({} if values is None else values, kind, strict=False), False
    except _NOT_CONVERTIBLE:
        pass
    usable: dict[str, object] = {}
    for key, value in values.items() if isinstance(values, dict) else ():
        try:
            msgspec.convert({key: value}, kind, strict=False)
        except _NOT_CONVERTIBLE:
            continue
        usable[key] = value
    return msgspec.convert(usable, kind, strict=False), True


SHAPED = frozenset(f"aten::{name}" for names in OPERATORS.values() for name in names)

_MOST_INPUTS = 64
_MOST_SIZES = 16
_LARGEST = 1 << 48


def is_shaped(name: str) -> bool:
    """Return whether an operator is read with its shapes; Inductor's kernels state the bytes they move."""
    return name in SHAPED or name.startswith("triton_")


def call_of(arguments: CalledArguments) -> OperatorCall:
    """Return the call as plain, bounded values; without sizes if the file has no usable ones."""
    texts = (arguments.sizes, arguments.types, arguments.values, arguments.strides)
    sizes, types, values, strides = map(_decoded, texts)
    count = len(sizes) if len(sizes) <= _MOST_INPUTS else 0
    gigabytes = arguments.gigabytes
    moved = round(gigabytes * 1e9) if gigabytes and 0 < gigabytes < _LARGEST / 1e9 else None
    shapes, steps = (tuple(map(_shape, each[:count])) for each in (sizes, strides))
    nested = (
        [each for each in size if isinstance(each, list)] for size in sizes[:count] if isinstance(size, list)
    )
    inside = tuple(tuple(map(_shape, each)) for each in nested)
    return OperatorCall(shapes, _texts(types, count), _texts(values, count), steps, moved, inside)


def _decoded(text: Raw) -> list[Any]:
    """Return the list in the text; empty if it has none."""
    found = msgspec.json.decode(text) if text != ABSENT else None
    return found if isinstance(found, list) else []


def _shape(value: Any) -> tuple[int, ...]:
    """Return the sizes of one tensor; empty for a list of tensors and for anything else."""
    if not isinstance(value, list) or len(value) > _MOST_SIZES:
        return ()
    if any(type(size) is not int or not 0 <= size <= _LARGEST for size in value):
        return ()
    return tuple(value)


def _texts(values: Sequence[Any], count: int) -> tuple[str, ...]:
    found = [each[:80] if isinstance(each, str) else "" for each in values[:count]]
    return (*found, *[""] * (count - len(found)))
