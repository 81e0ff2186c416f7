r"""Reader of Kineto traces (Chrome trace JSON, plain or gzip) into `Trace`.

    blocks of bytes -> chunks of events -> typed structs -> columns -> Trace
                                \-> if that fails: cut by brackets, repaired, events converted one by one

The first way needs about a second for a million events, and little memory.  Garbage collection is paused
during it: it would traverse thousands of new objects, none of them garbage, again and again."""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fsdpbench.base.errors import error_text
from fsdpbench.reports.readers import trace_events
from fsdpbench.reports.readers.trace import Trace, TraceError, TraceLimits
from fsdpbench.reports.readers.trace_columns import ColumnBuilder, needs_digits
from fsdpbench.reports.readers.trace_text import UncuttableError, cut, cut_exactly, nesting, read_blocks


def read_trace(path: Path | str, limits: TraceLimits | None = None, *, all_calls: bool = False) -> Trace:
    """Decode one rank's trace file.

    Args:
        path: a Kineto JSON file, gzip-compressed or plain; the content decides, not the name.
        limits: limits on the file's demands; by default those of `FSDPBENCH_TRACE_LIMITS`.
        all_calls: keep the inputs of every operator, with lists of tensors, not only if the cost is known.

    Raises:
        TraceError: the file is missing, empty, truncated, not JSON, not a trace, or beyond a limit.
    """
    path = Path(path)
    try:
        limits = limits or TraceLimits.from_environment()
    except ValueError as error:
        raise TraceError(path, f"is not read: {error}") from None
    with _no_garbage_collection():
        try:
            try:
                decoded = _decode_in_chunks(_Decoded(path, limits, ColumnBuilder(all_calls)))
            except (UncuttableError, msgspec.DecodeError, UnicodeDecodeError):
                decoded = _decode_tolerantly(_Decoded(path, limits, ColumnBuilder(all_calls)))
        except RecursionError:
            raise TraceError(path, error_text("trace_reader.depth")) from None
        return _assemble(path, decoded)


@dataclass
class _Decoded:
    """The content of a file: events in the builder, everything beside them as plain values."""

    path: Path
    limits: TraceLimits
    builder: ColumnBuilder = field(default_factory=ColumnBuilder)
    beside: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def check_depth(self, text: bytes, outside: int) -> None:
        """Raise TraceError if `text`, which is inside `outside` levels, nests deeper than the limit."""
        depth = nesting(text) + outside
        if depth > self.limits.depth:
            raise TraceError(self.path, self.limits.refusal("depth", f"nests {depth:,} levels deep"))

    def events_of(self, text: bytes) -> Sequence[trace_events.FloatEvent]:
        """Return the events of a list. Raises TraceError as `check_depth` does, and the decoder's errors."""
        try:
            events = trace_events.KNOWN_EVENTS.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.check_depth(text, outside=1)
            return trace_events.FLOAT_EVENTS.decode(text)
        # Only arguments nest, inside the file, its list and an event: n levels have 2n brackets.
        shallow = 2 * (self.limits.depth - 3)
        if long := [event.args for event in events if len(event.args) > shallow]:
            self.check_depth(b"[%b]" % b",".join(long), outside=2)
        return events

    def add(self, events: Sequence[trace_events.FloatEvent], text: bytes | None) -> None:
        """Append events; `text` is the JSON they were decoded from, in case their digits are needed."""
        if text is None or not needs_digits((event.ts for event in events), text):
            self.builder.add(events)
        elif text.startswith(b"["):
            self.builder.add(trace_events.EXACT_EVENTS.decode(text))
        else:
            self.builder.add(trace_events.EXACT_FILE.decode(text).events)
        if self.builder.seen > self.limits.events:
            found = f"holds more than {self.limits.events:,} events"
            raise TraceError(self.path, self.limits.refusal("events", found))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _decode_in_chunks(decoded: _Decoded) -> _Decoded:
    for kind, text in cut(read_blocks(decoded.path, decoded.limits), decoded.limits):
        if kind == "events":
            decoded.add(decoded.events_of(text), text)
            continue
        decoded.check_depth(text, outside=0)
        file = trace_events.FILE.decode(text)
        decoded.beside |= _beside(file)
        if file.events:
            # The end of the file: its events only, as a list again, in case their digits are needed.
            decoded.add(file.events, None if kind == "beginning" else text)
    return decoded


def _beside(file: trace_events.File) -> dict[str, object]:
    found = {
        "distributedInfo": file.distributed,
        "deviceProperties": file.devices,
        "fsdpbench": file.simulated,
    }
    return {key: msgspec.json.decode(raw) for key, raw in found.items() if raw != trace_events.ABSENT}


def _decode_tolerantly(decoded: _Decoded) -> _Decoded:
    """Decode, slowly, a file that the strict decoder refuses. Raises TraceError with the reason."""
    path, limits = decoded.path, decoded.limits
    lost = 0
    defects: list[str] = []
    try:
        for kind, text in cut_exactly(path, read_blocks(path, limits), limits):
            if kind == "beside":
                content, defect = recover_value(text)
                decoded.beside = _trace_object(path, content)
            else:
                found = recover_events(text)
                decoded.builder.seen += found.lost
                decoded.add(found.events, found.text)
                decoded.add(found.converted, None)
                lost, defect = lost + found.lost, found.defect
            defects += [defect] if defect else []
    except UnmendableError as error:
        raise TraceError(path, f"is not JSON ({error})") from None
    if defects:
        decoded.remarks.append(f"the file is not valid JSON ({defects[0]}); it was repaired before reading")
    if lost:
        decoded.problems.append(f"{lost} events could not be understood: left out")
    return decoded


def _trace_object(path: Path, content: Any) -> dict[str, object]:
    """Return the file without its events; a file may be only a list of events."""
    if isinstance(content, list):
        return {}
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TraceError(path, "is JSON, but not a trace: it has no list 'traceEvents'")
    return content


def _assemble(path: Path, decoded: _Decoded) -> Trace:
    if decoded.builder.seen == 0 and not decoded.problems:
        raise TraceError(path, "holds no events ('traceEvents' is empty)")
    columns = decoded.builder.finish()
    if not len(columns.events):
        raise TraceError(path, "holds no usable event of a profiler (operator, kernel or annotation)")
    distributed = decoded.beside.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    devices = decoded.beside.get("deviceProperties")
    simulated = decoded.beside.get("fsdpbench")
    rank, world_size, problems, remarks = _identity(path.name, distributed)
    findings = {
        "problems": (*decoded.problems, *columns.problems, *problems),
        "remarks": (*decoded.remarks, *columns.remarks, *remarks),
    }
    return Trace(
        **vars(columns) | findings,
        path=path,
        rank=rank,
        world_size=world_size,
        backend=str(distributed["backend"])[:200] if "backend" in distributed else None,
        devices=tuple(each for each in devices if isinstance(each, dict))
        if isinstance(devices, list)
        else (),
        simulated=simulated if isinstance(simulated, dict) else None,
    )


_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_MOST_RANKS = 2**31


def _identity(
    name: str, distributed: Mapping[str, Any]
) -> tuple[int | None, int | None, list[str], list[str]]:
    """Return the rank and world size from the file's name and its "distributedInfo", None if they are missing
    or impossible; and problems and remarks."""
    problems: list[str] = []
    remarks: list[str] = []
    rank = _number(distributed, "rank", 0, problems)
    world_size = _number(distributed, "world_size", 1, problems)
    if rank is not None and world_size is not None and rank >= world_size:
        problems.append(f"the file says that it is of rank {rank} of {world_size} ranks")
    found = _IN_NAME.search(name)
    named = int(found[1]) if found and len(found[1]) < 10 else None
    if rank is None:
        rank = named
    elif named is not None and named != rank:
        remarks.append(f"the file's name says rank {named}, its content rank {rank}, which counts")
    return rank, world_size, problems, remarks


def _number(distributed: Mapping[str, Any], key: str, least: int, problems: list[str]) -> int | None:
    value = distributed.get(key)
    if value is None:
        return None
    if type(value) is int and least <= value < _MOST_RANKS:
        return value
    problems.append(f"the file's {key} is {str(value)[:40]!r}, which cannot be")
    return None


# Recovery of traces that are not quite JSON, or not quite of the usual shape.
#
# Observed in practice: raw control characters and invalid UTF-8 in names, backslashes of Windows paths, `NaN`
# and `inf` as bandwidths, time stamps as strings.  The text is repaired as a whole, then every event is
# converted on its own, so that a broken event is lost alone, not the file.

_CONTROL = bytes(0x20 if byte < 0x20 else byte for byte in range(256))
_ESCAPE = re.compile(rb'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])?')
_OFFSET = re.compile(r" \(byte \d+\)$")
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)[-+]?(?:NaN|nan|Infinity|inf|Inf)(?=\s*[,}\]])")


def mend(text: bytes) -> bytes:
    """Return the same JSON with every defect named above replaced by something harmless.

    Control characters become blanks: between tokens they are white space anyway.  A backslash that does not
    begin a valid escape is doubled.  Values that are not numbers become null.
    """
    text = text.translate(_CONTROL)
    text = _ESCAPE.sub(lambda match: match[0] if len(match[0]) > 1 else b"\\\\", text)
    text = _NOT_A_NUMBER.sub(rb"\1null", text)
    return text.decode("utf-8", errors="replace").encode("utf-8")


class UnmendableError(Exception):
    """Raised for text that is not JSON, even after repair; the message is the decoder's."""


@dataclass
class Recovered:
    """The content of a list of events.

    events, text: events of the usual shape, and the JSON they were decoded from.  converted: events with, for
    example, numbers as strings.  lost: number of unreadable events.  defect: why the text needed repair.
    """

    events: list[trace_events.FloatEvent]
    text: bytes
    converted: list[trace_events.FloatEvent] = field(default_factory=list)
    lost: int = 0
    defect: str | None = None


def recover_events(text: bytes) -> Recovered:
    """Return the events of a JSON list, repaired if necessary. Raises UnmendableError."""
    defect = None
    try:
        return Recovered(trace_events.FLOAT_EVENTS.decode(text), text)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        defect, text = _message(error), mend(text)
    try:
        raws = trace_events.RAW_EVENTS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnmendableError(_message(error)) from None
    found = Recovered([], b"", defect=defect)
    usual: list[bytes] = []
    for raw in raws:
        try:
            found.events.append(trace_events.FLOAT_EVENT.decode(raw))
            usual.append(bytes(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            converted, lost = _convert(raw)
            found.converted += converted
            found.lost += lost
    found.text = b"[" + b",".join(usual) + b"]"
    return found


def recover_value(text: bytes) -> tuple[Any, str | None]:
    """Return the plain value of JSON, repaired if necessary, and the defect. Raises UnmendableError."""
    try:
        return msgspec.json.decode(text), None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        defect = _message(error)
    try:
        return msgspec.json.decode(mend(text)), defect
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnmendableError(_message(error)) from None


def _convert(raw: msgspec.Raw) -> tuple[list[trace_events.FloatEvent], int]:
    """Return an event from plain JSON values, accepting numbers given as strings; and 1 if it is lost."""
    try:
        plain = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [], 1
    try:
        arguments = plain.pop("args", None)
        converted = msgspec.convert(plain, trace_events.FloatEvent, strict=False)
    except (AttributeError, TypeError, msgspec.ValidationError, OverflowError, ValueError):
        # Events other than complete and instant ones are not used, so they are not lost.
        other = isinstance(plain, dict) and isinstance(plain.get("ph"), str) and plain["ph"] not in ("X", "i")
        return [], 0 if other else 1
    converted.args = msgspec.Raw(msgspec.json.encode(arguments)) if arguments else trace_events.ABSENT
    return [converted], 0


def _message(error: Exception) -> str:
    """Return the decoder's message without its offset, which counts from the beginning of a piece."""
    return _OFFSET.sub("", str(error))[:200]
