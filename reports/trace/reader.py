"""Reads a Kineto trace (Chrome trace JSON, plain or gzip) into `Trace`.

    bytes -> (gunzip) -> typed structs -> columns -> Trace
                   \\-> mended, converted one by one, when the strict decoder refuses

The strict way needs about a second for a million events.  Garbage collection is paused meanwhile: millions of
new objects, none of them garbage, would otherwise be walked again and again.
"""

from __future__ import annotations

import gc
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from reports.trace.columns import EventColumns, build_columns
from reports.trace.model import Trace, TraceError
from reports.trace.raw import EXACT_DECODER, FLOAT_DECODER, Event, Head
from reports.trace.repair import convert_events, mend

LARGEST_EXACT_MICROSECONDS = 2.0**43
"""Up to here a double tells neighbouring nanoseconds apart (its steps are at most 0.001 us)."""

_TRUNCATED_JSON = "is truncated: the JSON ends in the middle; record or copy it again"
_GZIP_MAGIC = b"\x1f\x8b"
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)


def read_trace(path: Path | str) -> Trace:
    """Decodes one rank's trace file.

    Args:
        path: a Kineto JSON file, gzip-compressed or plain; the content decides, not the name.

    Raises:
        TraceError: the file is missing, empty, truncated, not JSON, or JSON that holds no trace.
    """
    path = Path(path)
    text = _read_bytes(path)
    with _no_garbage_collection():
        decoded = _decode(path, text)
        del text
        if not decoded.events:
            raise TraceError(path, "holds no events ('traceEvents' is empty)")
        columns = build_columns(decoded.events)
        del decoded.events[:]
    if columns.timed == 0:
        raise TraceError(path, "holds no event with a start and a duration ('ph': 'X')")
    return _assemble(path, columns, decoded)


@dataclass
class _Decoded:
    events: list[Event]
    distributed: dict[str, Any]
    devices: tuple[dict[str, Any], ...]
    simulated: dict[str, Any] | None
    problems: list[str]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise TraceError(path, "is a folder, not a trace file") from None
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})") from None
    if not data:
        raise TraceError(path, "is empty (0 bytes)")
    if data.startswith(_GZIP_MAGIC):
        data = _gunzip(path, data)
        if not data:
            raise TraceError(path, "is an empty gzip file")
    return data


def _gunzip(path: Path, data: bytes) -> bytes:
    """All members of a gzip file; a file that ends before its last member does is truncated."""
    parts: list[bytes] = []
    rest = data
    while rest.startswith(_GZIP_MAGIC):
        stream = zlib.decompressobj(wbits=31)
        try:
            parts.append(stream.decompress(rest))
        except zlib.error as error:
            raise TraceError(path, f"is damaged: the gzip data cannot be unpacked ({error})") from None
        if not stream.eof:
            raise TraceError(path, "is truncated: the gzip data end in the middle; record or copy it again")
        rest = stream.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decode(path: Path, text: bytes) -> _Decoded:
    try:
        file = FLOAT_DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_tolerantly(path, text)
    if file.events is None:
        raise TraceError(path, "is JSON, but not a trace: it has no 'traceEvents'")
    events: list[Event] = list(file.events)
    if any(event.ts is not None and event.ts > LARGEST_EXACT_MICROSECONDS for event in file.events) and any(
        event.ts is not None and event.ts % 1 for event in file.events
    ):
        events = list(EXACT_DECODER.decode(text).events or ())
    return _Decoded(events, *_decode_head(file), [])


def _decode_head(head: Head) -> tuple[dict[str, Any], tuple[dict[str, Any], ...], dict[str, Any] | None]:
    def plain(raw: msgspec.Raw) -> Any:
        return msgspec.json.decode(raw) if len(bytes(raw)) else None

    return _head(plain(head.distributed), plain(head.devices), plain(head.simulated))


def _head(
    distributed: object, devices: object, simulated: object
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...], dict[str, Any] | None]:
    return (
        distributed if isinstance(distributed, dict) else {},
        tuple(device for device in devices if isinstance(device, dict)) if isinstance(devices, list) else (),
        simulated if isinstance(simulated, dict) else None,
    )


def _decode_tolerantly(path: Path, text: bytes) -> _Decoded:
    """The slow way, for files that the strict decoder refuses; TraceError says why when it fails too."""
    problems: list[str] = []
    text = text.removeprefix(b"\xef\xbb\xbf")
    if text.lstrip()[:1] not in (b"{", b"["):
        raise TraceError(path, f"is not JSON (it begins with {text[:16]!r})")
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as first:
        if "truncated" in str(first):
            raise TraceError(
                path, "is truncated: the JSON ends in the middle; record or copy it again"
            ) from None
        document = _decode_mended(path, text)
        problems.append(f"the file is not valid JSON ({first}); it was mended to be read")
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(path, "is JSON, but not a trace: it has no list 'traceEvents'")
    events, lost = convert_events(document["traceEvents"])
    if lost:
        problems.append(f"{lost} events could not be understood and were left out")
    head = _head(document.get("distributedInfo"), document.get("deviceProperties"), document.get("fsdpbench"))
    return _Decoded(list(events), *head, problems)


def _decode_mended(path: Path, text: bytes) -> Any:
    mended = mend(text)
    try:
        return msgspec.json.decode(mended)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "truncated" in str(error):
            raise TraceError(
                path, "is truncated: the JSON ends in the middle; record or copy it again"
            ) from None
    try:
        # The standard library's decoder says where; msgspec says what.
        return json.loads(mended)
    except json.JSONDecodeError as error:
        raise TraceError(path, f"is not JSON: {error.msg} at byte {error.pos}") from None


def _assemble(path: Path, columns: EventColumns, decoded: _Decoded) -> Trace:
    distributed = decoded.distributed
    rank = distributed.get("rank")
    problems = [*decoded.problems, *columns.problems]
    if not isinstance(rank, int):
        in_name = _RANK_IN_NAME.search(path.name)
        rank = int(in_name[1]) if in_name else None
    world_size = distributed.get("world_size")
    return Trace(
        path=path,
        events=columns.events,
        names=columns.names,
        lanes=columns.lanes,
        collectives=columns.collectives,
        memory=columns.memory,
        retries=columns.retries,
        rank=rank,
        world_size=world_size if isinstance(world_size, int) else None,
        backend=str(distributed["backend"]) if "backend" in distributed else None,
        devices=decoded.devices,
        simulated=decoded.simulated,
        problems=tuple(problems),
        dropped_kernels=columns.dropped_kernels,
    )
