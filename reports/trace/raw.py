"""The part of Kineto's JSON that is decoded, as msgspec structs: only fields named here become objects.

Events of two shapes exist because of numbers: most traces count microseconds from a recent base, so that a
double holds nanoseconds exactly; older ones count from 1970 with three decimals, which a double cannot hold
(at 1.7e15 its steps are 0.25).  For those the digits themselves are kept (`ExactEvent`).
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct, field

Number = int | float

ABSENT = Raw(b"")
"""An undecoded field that the file does not have. (`Raw | None` would be decoded like any other value.)"""


class Arguments(Struct, frozen=True, gc=False):
    external: int = field(name="External id", default=-1)
    correlation: int = -1
    stream: int | str = -1
    device: int | str = -1
    collective: str | None = field(name="Collective name", default=None)
    in_elements: Number | None = field(name="In msg nelems", default=None)
    out_elements: Number | None = field(name="Out msg nelems", default=None)
    group_size: Number | None = field(name="Group size", default=None)
    group_name: str | None = field(name="Process Group Name", default=None)
    dtype: str | None = None
    input_dims: Raw = field(name="Input Dims", default=ABSENT)
    input_types: Raw = field(name="Input type", default=ABSENT)
    device_type: int | None = field(name="Device Type", default=None)
    device_id: int | None = field(name="Device Id", default=None)
    address: int | None = field(name="Addr", default=None)
    bytes_signed: Number | None = field(name="Bytes", default=None)
    allocated: Number | None = field(name="Total Allocated", default=None)
    reserved: Number | None = field(name="Total Reserved", default=None)
    freed: Number | None = field(name="Freed", default=None)


NO_ARGUMENTS = Arguments()


class FloatEvent(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float | None = None
    dur: float | None = None
    args: Arguments = NO_ARGUMENTS


class ExactEvent(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Raw = ABSENT
    dur: Raw = ABSENT
    args: Arguments = NO_ARGUMENTS


Event = FloatEvent | ExactEvent


class Head(Struct):
    """Everything beside the events, undecoded: it is small, and foreign files put anything there."""

    distributed: Raw = field(name="distributedInfo", default=ABSENT)
    devices: Raw = field(name="deviceProperties", default=ABSENT)
    simulated: Raw = field(name="fsdpbench", default=ABSENT)


class FloatFile(Head):
    events: list[FloatEvent] | None = field(name="traceEvents", default=None)


class ExactFile(Head):
    events: list[ExactEvent] | None = field(name="traceEvents", default=None)


FLOAT_DECODER = msgspec.json.Decoder(FloatFile)
EXACT_DECODER = msgspec.json.Decoder(ExactFile)
