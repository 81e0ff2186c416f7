"""Reads a Kineto trace (Chrome trace JSON, plain or gzip) into `Trace`.

    blocks of bytes -> chunks of events -> typed structs -> columns -> Trace
                                \\-> the whole text mended, events converted one by one, when that fails

The first way needs about a second for a million events, and little memory.  Garbage collection is paused
meanwhile: thousands of new objects, none of them garbage, would be walked again and again.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from reports.trace.blocks import read_blocks
from reports.trace.chunks import UncuttableError, cut
from reports.trace.columns import ColumnBuilder
from reports.trace.model import Trace, TraceError
from reports.trace.raw import ABSENT, EXACT_EVENTS, EXACT_FILE, FILE, FLOAT_EVENTS, File, FloatEvent
from reports.trace.repair import convert_events, mend
from reports.trace.times import needs_digits

_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_TRUNCATED = "is truncated: the JSON ends in the middle; record or copy it again"


def read_trace(path: Path | str) -> Trace:
    """Decodes one rank's trace file.

    Args:
        path: a Kineto JSON file, gzip-compressed or plain; the content decides, not the name.

    Raises:
        TraceError: the file is missing, empty, truncated, not JSON, or JSON that holds no trace.
    """
    path = Path(path)
    with _no_garbage_collection():
        try:
            decoded = _decode_in_chunks(path)
        except (UncuttableError, msgspec.DecodeError, UnicodeDecodeError):
            decoded = _decode_tolerantly(path, b"".join(read_blocks(path)))
        return _assemble(path, decoded)


@dataclass
class _Decoded:
    """What a file held: events in the builder, everything beside them as plain values."""

    builder: ColumnBuilder = field(default_factory=ColumnBuilder)
    beside: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _decode_in_chunks(path: Path) -> _Decoded:
    decoded = _Decoded()
    for kind, text in cut(read_blocks(path)):
        if kind == "events":
            _add_events(decoded.builder, FLOAT_EVENTS.decode(text), text)
            continue
        file = FILE.decode(text)
        decoded.beside |= _beside(file)
        if file.events:
            # The end of the file: its events alone, again as a list, in case their digits are needed.
            _add_events(decoded.builder, file.events, None if kind == "beginning" else text)
    return decoded


def _add_events(builder: ColumnBuilder, events: list[FloatEvent], text: bytes | None) -> None:
    if text is not None and needs_digits((event.ts for event in events), text):
        if text.startswith(b"["):
            builder.add(EXACT_EVENTS.decode(text))
        else:
            builder.add(EXACT_FILE.decode(text).events)
    else:
        builder.add(events)


def _beside(file: File) -> dict[str, Any]:
    found = {
        "distributedInfo": file.distributed,
        "deviceProperties": file.devices,
        "fsdpbench": file.simulated,
    }
    return {key: msgspec.json.decode(raw) for key, raw in found.items() if raw != ABSENT}


def _decode_tolerantly(path: Path, text: bytes) -> _Decoded:
    """The slow way, for files that the strict decoder refuses; TraceError says why when it fails too."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if not text.strip():
        raise TraceError(path, "is empty (only white space)")
    if text.lstrip()[:1] not in (b"{", b"["):
        raise TraceError(path, f"is not JSON (it begins with {text[:16]!r})")
    decoded = _Decoded()
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "truncated" in str(error):
            raise TraceError(path, _TRUNCATED) from None
        document = _decode_mended(path, text)
        decoded.problems.append(f"the file is not valid JSON ({error}); it was mended to be read")
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(path, "is JSON, but not a trace: it has no list 'traceEvents'")
    events, lost = convert_events(document.pop("traceEvents"))
    if lost:
        decoded.problems.append(f"{lost} events could not be understood: left out")
    decoded.builder.add(events)
    decoded.beside = document
    return decoded


def _decode_mended(path: Path, text: bytes) -> Any:
    try:
        return msgspec.json.decode(mend(text))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "truncated" in str(error):
            raise TraceError(path, _TRUNCATED) from None
        raise TraceError(path, f"is not JSON ({error})") from None


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
    rank, world_size = distributed.get("rank"), distributed.get("world_size")
    if not isinstance(rank, int):
        in_name = _RANK_IN_NAME.search(path.name)
        rank = int(in_name[1]) if in_name else None
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
        devices=tuple(each for each in devices if isinstance(each, dict))
        if isinstance(devices, list)
        else (),
        simulated=simulated if isinstance(simulated, dict) else None,
        problems=(*decoded.problems, *columns.problems),
        dropped_kernels=columns.dropped_kernels,
    )
