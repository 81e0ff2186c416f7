"""The shape of Kineto's JSON, as msgspec structs: only the fields named here become objects.

Arguments stay undecoded text at first (`Raw`): most events' arguments are never looked at.

Events of two shapes exist because of numbers.  Most traces count microseconds from a recent base, so that a
double holds nanoseconds exactly; older ones count from 1970 with three decimals, which a double cannot hold
(at 1.7e15 its steps are 0.25).  For those the digits themselves are kept (`ExactEvent`).
"""

from __future__ import annotations

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

ABSENT = Raw(b"")
"""An undecoded field that the file does not have. (`Raw | None` would be decoded like any other value.)"""


class FloatEvent(Struct, gc=False):
    """An event whose times are doubles, in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: Raw = ABSENT


class ExactEvent(Struct, gc=False):
    """An event whose times are kept as digits, for those that a double cannot hold."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Raw = ABSENT
    dur: Raw = ABSENT
    args: Raw = ABSENT


class File(Struct, gc=False):
    """A whole file, or its beginning or end; what is beside the events is small and decoded later."""

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
RAW_EVENTS = Decoder(list[Raw])
EXACT_EVENTS = Decoder(list[ExactEvent])
