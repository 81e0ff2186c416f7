"""Reads a Kineto trace (Chrome trace JSON, plain or gzip) into `Trace`.

    blocks of bytes -> chunks of events -> typed structs -> columns -> Trace
                                \\-> cut by brackets, fixed, events converted one by one, when that fails

The first way needs about a second for a million events, and little memory.  Garbage collection is paused
meanwhile: thousands of new objects, none of them garbage, would be walked again and again.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fsdpbench.reports.trace.columns import ColumnBuilder
from fsdpbench.reports.trace.limits import TraceLimits
from fsdpbench.reports.trace.model import Trace, TraceError
from fsdpbench.reports.trace.text.blocks import read_blocks
from fsdpbench.reports.trace.text.chunks import UncuttableError, cut
from fsdpbench.reports.trace.text.exact_chunks import cut_exactly
from fsdpbench.reports.trace.text.raw import (
    ABSENT,
    EXACT_EVENTS,
    EXACT_FILE,
    FILE,
    FLOAT_EVENTS,
    File,
    FloatEvent,
)
from fsdpbench.reports.trace.text.repair import UnmendableError, recover_events, recover_value
from fsdpbench.reports.trace.text.structure import nesting
from fsdpbench.reports.trace.times import needs_digits


def read_trace(path: Path | str, limits: TraceLimits | None = None) -> Trace:
    """Decodes one rank's trace file.

    Args:
        path: a Kineto JSON file, gzip-compressed or plain; the content decides, not the name.
        limits: how much the file may ask for; the defaults and `FSDPBENCH_TRACE_LIMITS` unless given.

    Raises:
        TraceError: the file is missing, empty, truncated, not JSON, no trace, or beyond a limit.
    """
    path = Path(path)
    try:
        limits = limits or TraceLimits.from_environment()
    except ValueError as error:
        raise TraceError(path, f"is not read: {error}") from None
    with _no_garbage_collection():
        try:
            try:
                decoded = _decode_in_chunks(path, limits)
            except (UncuttableError, msgspec.DecodeError, UnicodeDecodeError):
                decoded = _decode_tolerantly(path, limits)
        except RecursionError:
            raise TraceError(
                path, "nests deeper than Python can decode, whatever the limit `depth`"
            ) from None
        return _assemble(path, decoded)


@dataclass
class _Decoded:
    """What a file held: events in the builder, everything beside them as plain values."""

    path: Path
    limits: TraceLimits
    builder: ColumnBuilder = field(default_factory=ColumnBuilder)
    beside: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def check_depth(self, text: bytes, outside: int) -> None:
        """Raises TraceError where `text`, inside of `outside` levels, nests deeper than the limit."""
        depth = nesting(text) + outside
        if depth > self.limits.depth:
            raise TraceError(self.path, self.limits.refusal("depth", f"nests {depth:,} levels deep"))

    def add(self, events: list[FloatEvent], text: bytes | None) -> None:
        """Appends events; `text` is what they were decoded from, in case their digits are needed."""
        if text is not None and needs_digits((event.ts for event in events), text):
            if text.startswith(b"["):
                self.builder.add(EXACT_EVENTS.decode(text))
            else:
                self.builder.add(EXACT_FILE.decode(text).events)
        else:
            self.builder.add(events)
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


def _decode_in_chunks(path: Path, limits: TraceLimits) -> _Decoded:
    decoded = _Decoded(path, limits)
    for kind, text in cut(read_blocks(path, limits), limits):
        decoded.check_depth(text, outside=1 if kind == "events" else 0)
        if kind == "events":
            decoded.add(FLOAT_EVENTS.decode(text), text)
            continue
        file = FILE.decode(text)
        decoded.beside |= _beside(file)
        if file.events:
            # The end of the file: its events alone, again as a list, in case their digits are needed.
            decoded.add(file.events, None if kind == "beginning" else text)
    return decoded


def _beside(file: File) -> dict[str, Any]:
    found = {
        "distributedInfo": file.distributed,
        "deviceProperties": file.devices,
        "fsdpbench": file.simulated,
    }
    return {key: msgspec.json.decode(raw) for key, raw in found.items() if raw != ABSENT}


def _decode_tolerantly(path: Path, limits: TraceLimits) -> _Decoded:
    """The slow way, for files that the strict decoder refuses; TraceError says why when it fails too."""
    decoded = _Decoded(path, limits)
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


def _trace_object(path: Path, content: Any) -> dict[str, Any]:
    """The file without its events; a list of events may stand alone."""
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
    identity = identify(path.name, distributed)
    return Trace(
        path=path,
        events=columns.events,
        names=columns.names,
        lanes=columns.lanes,
        collectives=columns.collectives,
        calls=columns.calls,
        memory=columns.memory,
        retries=columns.retries,
        rank=identity.rank,
        world_size=identity.world_size,
        backend=str(distributed["backend"])[:200] if "backend" in distributed else None,
        devices=tuple(each for each in devices if isinstance(each, dict))
        if isinstance(devices, list)
        else (),
        simulated=simulated if isinstance(simulated, dict) else None,
        problems=(*decoded.problems, *columns.problems, *identity.problems),
        remarks=(*decoded.remarks, *columns.remarks, *identity.remarks),
    )


_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_MOST_RANKS = 2**31


@dataclass(frozen=True)
class Identity:
    """None where the file does not tell, or tells what cannot be."""

    rank: int | None
    world_size: int | None
    problems: tuple[str, ...]
    remarks: tuple[str, ...]


def identify(name: str, distributed: Mapping[str, Any]) -> Identity:
    """From the file's name and its "distributedInfo"."""
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
    return Identity(rank, world_size, tuple(problems), tuple(remarks))


def _number(distributed: Mapping[str, Any], key: str, least: int, problems: list[str]) -> int | None:
    value = distributed.get(key)
    if value is None:
        return None
    if type(value) is int and least <= value < _MOST_RANKS:
        return value
    problems.append(f"the file's {key} is {str(value)[:40]!r}, which cannot be")
    return None
