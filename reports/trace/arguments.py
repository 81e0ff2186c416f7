"""Arguments of events by kind, decoded many at a time.

The arguments of one kind are joined into one JSON list: one call decodes thousands.  When that fails (a
number given as a string, a list where a number belongs) each is decoded on its own, and a field of the wrong
kind is left out by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from fsdpbench.reports.trace.text.raw import ABSENT

Number = int | float


class CallArguments(Struct, frozen=True, gc=False):
    """Of a runtime call, such as a kernel's launch."""

    correlation: int = -1


class DeviceArguments(Struct, frozen=True, gc=False):
    """Of a kernel, a copy or a memory set; NCCL kernels carry what their collective was."""

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
    """Of a process group's annotation: the shapes and types of its inputs (with `record_shapes`)."""

    input_dims: list[Any] | None = field(name="Input Dims", default=None)
    input_types: list[Any] | None = field(name="Input type", default=None)


class CalledArguments(Struct, frozen=True, gc=False):
    """Of an operator: what it was called with (with `record_shapes`), as text; what a fused kernel moves."""

    sizes: Raw = field(name="Input Dims", default=ABSENT)
    types: Raw = field(name="Input type", default=ABSENT)
    values: Raw = field(name="Concrete Inputs", default=ABSENT)
    strides: Raw = field(name="Input Strides", default=ABSENT)
    gigabytes: Number | None = field(name="kernel_num_gb", default=None)


class MemoryArguments(Struct, frozen=True, gc=False):
    """Of "[memory]" and "[alloc_retry]" events; numbers are bytes."""

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
    """One `kind` for each text, in order, defaults where there is nothing usable; and how many are broken."""
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
    """Raises ValueError if one is absent: it leaves a gap between two commas, or an empty list."""
    joined = b"[" + b",".join(texts) + b"]"
    decoded = msgspec.json.decode(joined, type=list[kind])  # type: ignore[valid-type]
    if len(decoded) != len(texts):
        raise ValueError("the only one is absent")
    return decoded


def _decode_one(text: Raw, kind: type[_Arguments]) -> tuple[_Arguments, bool]:
    """And whether something in it is not what it should be."""
    values = None
    try:
        values = msgspec.json.decode(text) if text != ABSENT else {}
        return msgspec.convert({} if values is None else values, kind, strict=False), False
    except _NOT_CONVERTIBLE:
        pass
    usable: dict[str, Any] = {}
    for key, value in values.items() if isinstance(values, dict) else ():
        try:
            msgspec.convert({key: value}, kind, strict=False)
        except _NOT_CONVERTIBLE:
            continue
        usable[key] = value
    return msgspec.convert(usable, kind, strict=False), True
