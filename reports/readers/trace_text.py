"""The text of a trace file: unpacked blocks of bytes, cut between events to be decoded piece by piece.

    {"schemaVersion": 1, ..., "traceEvents": [ {"ph": ...}, {"ph": ...}, ... {"ph": ...} ], "traceName": ...}
    |------------- beginning ---------------||--- chunk ---|   ...       |--------------- end --------------|

Reading and unpacking release the GIL, so they run on a thread of their own, a few blocks ahead of
the decoder.

A cut is made only at a closing brace, a comma, an opening brace and the key "ph" (the first key of the
file's first event) in sequence.  No string of valid JSON can contain them: the key's quotes would be
escaped.  They can occur deeper, in a list among an event's arguments; then the pieces do not decode, and the
reader begins again with `cut_exactly`, which follows every bracket.
"""

import queue
import re
import stat
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from fsdpbench.base.errors import error_text
from fsdpbench.reports.readers.trace import Bool, Int64, TraceError, TraceLimits, bytes_text

BLOCK_BYTES = 2 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_AHEAD = 2
_PATIENCE_S = 60.0
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_UTF16 = "is UTF-16 text, and JSON is UTF-8: convert it first"
_FORMATS = {
    b"\x1f\x8b": "is gzip inside gzip: unpack it once",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "is packed by zstd: unpack it first",
    b"\xfd7zXZ": "is packed by xz: unpack it first",
    b"BZh": "is packed by bzip2: unpack it first",
    b"\x04\x22\x4d\x18": "is packed by lz4: unpack it first",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"{\x00", b"\x00{"), _UTF16),
    b"SQLite format 3": "is an SQLite database (of nsys?), not a Kineto trace",
}
UTF8_MARK = b"\xef\xbb\xbf"
WHITE = b" \t\r\n"


def read_blocks(path: Path, limits: TraceLimits) -> Iterator[bytes]:
    """Yield the file's JSON, unpacked, in blocks of some megabytes, from its first bracket on.

    Raises:
        TraceError: the file is missing, unreadable or empty; its gzip data are damaged or truncated; it
            exceeds the limit `unpacked`; it does not begin like JSON.
    """
    total = 0
    begun = False
    try:
        with open_file(path) as file:
            compressed = file.read(2) == _GZIP_MAGIC
            if not compressed and path.stat().st_size > limits.unpacked:
                raise TraceError(path, limits.refusal("unpacked", _size(path, compressed, limits)))
            file.seek(0)
            blocks = _unpack(path, file) if compressed else iter(partial(file.read, BLOCK_BYTES), b"")
            for block in _ahead(path, blocks):
                total += len(block)
                if total > limits.unpacked:
                    raise TraceError(path, limits.refusal("unpacked", _size(path, compressed, limits)))
                if not begun and total - len(block) > limits.event:
                    found = f"begins with more than {bytes_text(limits.event)} of white space"
                    raise TraceError(path, limits.refusal("event", found))
                if not begun:
                    block = _beginning(path, block, first=total == len(block))
                    begun = bool(block)
                if block:
                    yield block
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})") from None
    if not begun:
        raise TraceError(path, "is empty (only white space)")


def open_file(path: Path) -> BinaryIO:
    """Open a regular file that is not empty. Everything else is refused, a pipe before it blocks.

    Raises:
        TraceError: it is not such a file.
        OSError: it cannot be opened.
    """
    try:
        state = path.stat()
    except ValueError as error:
        raise TraceError(path, f"cannot be read ({error})") from None
    if not stat.S_ISREG(state.st_mode):
        kind = _KINDS.get(stat.S_IFMT(state.st_mode), "no regular file")
        raise TraceError(path, f"is {kind}, not a trace file")
    if state.st_size == 0:
        raise TraceError(path, "is empty (0 bytes)")
    return path.open("rb")


def _size(path: Path, compressed: bool, limits: TraceLimits) -> str:
    size = bytes_text(path.stat().st_size)
    return f"unpacks from {size} to more than {bytes_text(limits.unpacked)}" if compressed else f"has {size}"


def _beginning(path: Path, block: bytes, *, first: bool) -> bytes:
    """Return the block from the file's first bracket on; empty if it is all white space."""
    if first:
        for magic, reason in _FORMATS.items():
            if block.startswith(magic):
                raise TraceError(path, reason)
        block = block.removeprefix(UTF8_MARK)
    block = block.lstrip(WHITE)
    if block and block[:1] not in (b"{", b"["):
        raise TraceError(path, f"is not JSON (it begins with {block[:16]!r})")
    return block


def _unpack(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of all members of a gzip file. A file that ends inside a member is truncated."""
    stream = zlib.decompressobj(wbits=31)
    rest = b""
    waiting: list[bytes] = []
    size = unpacked = 0
    while True:
        packed = rest or file.read(_packed_bytes())
        if stream.eof:
            # Another member, or the zeros that gzip allows after the last one.
            while packed and not (packed := packed.lstrip(b"\0")):
                packed = file.read(_packed_bytes())
            if packed and not _GZIP_MAGIC.startswith(packed[:2]):
                raise TraceError(path, "is damaged: something that is not gzip follows its gzip data")
            if packed:
                stream = zlib.decompressobj(wbits=31)
        if not packed:
            break
        try:
            block = stream.decompress(packed, BLOCK_BYTES)
        except zlib.error as error:
            raise TraceError(path, f"is damaged: its gzip data cannot be unpacked ({error})") from None
        rest = stream.unused_data if stream.eof else stream.unconsumed_tail
        # Members may hold a few bytes each.
        waiting.append(block)
        size += len(block)
        unpacked += len(block)
        if size >= BLOCK_BYTES // 8:
            yield b"".join(waiting)
            waiting, size = [], 0
    if not stream.eof:
        raise TraceError(path, "is truncated: its gzip data end in the middle; record or copy it again")
    if not unpacked:
        raise TraceError(path, "is empty (a gzip file with nothing in it)")
    yield b"".join(waiting)


def _packed_bytes() -> int:
    """Return how much to read at a time: little, because data after a member's end are copied each time."""
    return max(BLOCK_BYTES // 32, 16)


def _ahead(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same blocks, produced on another thread, whose exception, if any, is raised here."""
    ready: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
    places, stopped = threading.Semaphore(_AHEAD), threading.Event()

    def work() -> None:
        try:
            for block in blocks:
                ready.put(block)
                places.acquire()
                if stopped.is_set():
                    return
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=work, name="read-trace", daemon=True)
    thread.start()
    try:
        while (item := ready.get(timeout=_PATIENCE_S)) is not None:
            if isinstance(item, BaseException):
                raise item
            places.release()
            yield item
    except queue.Empty:
        raise TraceError(path, f"gives no data for {_PATIENCE_S:.0f} s: is its file system there?") from None
    finally:
        stopped.set()
        places.release()
        thread.join(_PATIENCE_S)


_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[\s*\{\s*("[^"\\]{1,32}")\s*:')
_LIST = b'"traceEvents"'
_LOOK_AROUND = 256


class UncuttableError(Exception):
    """Raised if the events cannot be distinguished by their first key."""


def cut(blocks: Iterable[bytes], limits: TraceLimits) -> Iterator[tuple[str, bytes]]:
    """Yield pieces as (kind, JSON): one "beginning" (a file without events), then "events" (lists), one "end"
    (a file with the last events and everything after them).

    Raises:
        UncuttableError: see above, or the file has several lists of events, or an event exceeds its limit.
    """
    iterator = iter(blocks)
    pending = b""
    for block in iterator:
        pending += block
        start = _EVENTS.search(pending)
        if start:
            break
        if len(pending) > limits.event:
            raise UncuttableError
    else:
        raise UncuttableError
    first = pending.index(b"{", pending.index(b"[", start.start() + len(_LIST)))
    key = start[1]
    if pending.count(_LIST, 0, first) > 1:
        raise UncuttableError
    yield "beginning", pending[:first] + b"]}"
    block, pending = pending[first:], b""
    while True:
        # Usually the block contains a boundary itself, and its bytes are copied once.
        at = _last_boundary(block, key)
        if not at and pending:
            block, pending = pending + block, b""
            at = _last_boundary(block, key)
        if at:
            comma = block.rindex(b",", 0, at)
            yield "events", b"".join((b"[", pending, memoryview(block)[:comma], b"]"))
        pending = block[at:]
        if len(pending) > limits.event:
            raise UncuttableError
        following = next(iterator, None)
        if following is None:
            break
        block = following
    if _LIST in pending:
        raise UncuttableError
    yield "end", b'{"traceEvents": [' + pending


def _last_boundary(text: bytes, key: bytes) -> int:
    """Return the offset of the last event in `text` that begins right after another one; 0 for none."""
    end = len(text)
    while (found := text.rfind(key, 0, end)) > 0:
        end = found
        low = max(found - _LOOK_AROUND, 0)
        before = text[low:found].rstrip(WHITE)
        if before.endswith(b"{"):
            preceding = before[:-1].rstrip(WHITE)
            if preceding.endswith(b",") and preceding[:-1].rstrip(WHITE).endswith(b"}"):
                return low + len(before) - 1
    return 0


# The slower way to cut a trace between events: it follows every bracket, whatever the events look like.
#
# For files with events inside events, with only a list of events, with keys of events in
# varying order, or with defects that must be repaired before a piece can be decoded.

TRUNCATED = "is truncated: the JSON ends in the middle; record or copy it again"
_KEY = re.compile(rb'"traceEvents"\s*:\s*\Z')
_KEY_AND_WHITE = 256


def cut_exactly(path: Path, blocks: Iterable[bytes], limits: TraceLimits) -> Iterator[tuple[str, bytes]]:
    """Yield pieces as (kind, text): "events" (lists), then one "beside" (the file without its events).

    Raises:
        TraceError: truncated, text after the end, no list of events or several, or beyond a limit.
    """
    cutter = _Cutter(path, limits)
    for block in blocks:
        for events in cutter.take(block):
            yield "events", events
    yield "beside", cutter.finish()


class _Cutter:
    """Takes blocks; returns the events that are complete, as lists."""

    def __init__(self, path: Path, limits: TraceLimits) -> None:
        self._path = path
        self._limits = limits
        self._finder = BracketFinder()
        self._beside: list[bytes] = []
        self._pending = b""
        self._level = 0  # of the list of events; 0 outside it
        self._lists = 0
        self._begins_list = False
        self._ended = False

    def take(self, block: bytes) -> Iterator[bytes]:
        block, brackets = self._finder.take(block)
        deepest = int(brackets.depth.max(initial=0))
        if deepest > self._limits.depth:
            raise TraceError(self._path, self._limits.refusal("depth", f"nests {deepest:,} levels deep"))
        at = place = 0  # in the block, and among its brackets
        while True:
            if not self._level:
                found = self._list_begins(block, brackets, at, place)
                if found is None:
                    self._keep_beside(block, brackets, at)
                    return
                self._beside.append(block[at : found[0]])
                at, place = found
                self._lists += 1
                self._begins_list = True
            ends = np.flatnonzero(brackets.depth[place:] < self._level)
            if not len(ends):
                break
            place += int(ends[0])
            yield from self._events(block[at : brackets.at[place]])
            at, place, self._level = int(brackets.at[place]), place + 1, 0
            self._pending = b""
        closed = ~brackets.opens[place:] & (brackets.depth[place:] == self._level)
        if closed.any():
            last = int(brackets.at[place:][closed][-1]) + 1
            yield from self._events(block[at:last])
            self._pending, at = b"", last
        self._pending += block[at:]
        if len(self._pending) > self._limits.event:
            found_bytes = f"holds an event of more than {bytes_text(self._limits.event)}"
            raise TraceError(self._path, self._limits.refusal("event", found_bytes))

    def finish(self) -> bytes:
        """Return the file without its events."""
        if self._finder.depth > 0 or self._finder.in_string:
            raise TraceError(self._path, TRUNCATED)
        if self._lists > 1:
            raise TraceError(self._path, error_text("trace_text.two_lists", self._lists))
        return b"".join(self._beside)

    def _list_begins(self, block: bytes, brackets: "Brackets", at: int, place: int) -> tuple[int, int] | None:
        """Return where the events of the next list begin: in the block, and in its brackets."""
        if not self._beside and not at and block[:1] == b"[":  # a list of events and nothing around it
            self._level = 1
            return 1, 1
        level = brackets.opens[place:] & (brackets.depth[place:] == 2) & (brackets.byte[place:] == ord("["))
        for number in (np.flatnonzero(level) + place).tolist():
            begin = int(brackets.at[number])
            before = block[max(at, begin - _KEY_AND_WHITE) : begin]
            if begin - at < _KEY_AND_WHITE:
                before = b"".join(self._beside)[-_KEY_AND_WHITE:] + before
            if _KEY.search(before):
                self._level = 2
                return begin + 1, number + 1
        return None

    def _keep_beside(self, block: bytes, brackets: "Brackets", at: int) -> None:
        closed = brackets.at[(brackets.depth <= 0) & (brackets.at >= at)]
        rest = block[int(closed[0]) + 1 :] if len(closed) and not self._ended else b""
        if (self._ended and block[at:].strip(WHITE)) or rest.strip(WHITE):
            raise TraceError(self._path, "is not JSON (something follows its end)")
        self._ended = self._ended or len(closed) > 0
        self._beside.append(block[at:])
        size = sum(map(len, self._beside))
        if size > self._limits.event:
            found = f"holds more than {bytes_text(self._limits.event)} beside its events"
            raise TraceError(self._path, self._limits.refusal("event", found))

    def _events(self, text: bytes) -> Iterator[bytes]:
        """Yield a piece of the list as a list of its own, without the comma before it."""
        text = (self._pending + text).strip(WHITE)
        if text and not self._begins_list:
            if not text.startswith(b",") or len(text) == 1:
                raise TraceError(self._path, "is not JSON (a comma between events is missing or too many)")
            text = text[1:]
        self._begins_list = False
        if text:
            yield b"[" + text + b"]"


_QUOTE, _BACKSLASH = ord('"'), ord("\\")

# `[` and `{`, and `]` and `}`, differ in one bit, so that one comparison finds both.
_BIT, _OPENING, _CLOSING = 0x20, ord("{"), ord("}")
_OTHERS = bytes(sorted(set(range(256)) - set(b'"[]{}')))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")

Bytes = npt.NDArray[np.uint8]


def nesting(text: bytes) -> int:
    """Return how many levels objects and lists nest in JSON; brackets in strings do not count."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Keep steps up and down and quotes only, and not even the quotes of most strings: a fortieth of the text.
    marks = text.translate(_STEPS, _OTHERS).replace(b'""', b"")
    steps = np.frombuffer(marks, np.int8)
    if b'"' in marks:
        quotes = steps == _QUOTE
        outside = np.cumsum(quotes, dtype=np.uint8) & 1 == 0
        steps = steps[outside & ~quotes]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


@dataclass(frozen=True, eq=False)
class Brackets:
    """The brackets of a block outside of strings: position, depth after each, direction, and the byte."""

    at: Int64
    depth: Int64
    opens: Bool
    byte: Bytes


class BracketFinder:
    """Finds the brackets of a text given in blocks; keeps the state from one block to the next."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._held = b""

    def take(self, block: bytes) -> "tuple[bytes, Brackets]":
        """Return the block to continue with, and its brackets. A backslash at the end is held back for the
        next block, which has the character that it escapes."""
        block = self._held + block
        run = len(block) - len(block.rstrip(b"\\"))
        self._held = b"\\" if run % 2 else b""
        block = block[: len(block) - len(self._held)]
        codes = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(codes == _QUOTE)
        if b"\\" in block:
            quotes = np.setdiff1d(quotes, _escaped(codes), assume_unique=True)
        at, self.in_string = _outside_strings(codes, quotes, within=self.in_string)
        opens = (codes[at] | _BIT) == _OPENING
        depth = self.depth + np.cumsum(np.where(opens, 1, -1))
        self.depth = int(depth[-1]) if len(depth) else self.depth
        return block, Brackets(at, depth, opens, codes[at])


def _outside_strings(codes: Bytes, quotes: Int64, *, within: bool) -> tuple[Int64, bool]:
    """Return positions of brackets outside strings, and if it ends in one. `within`: it begins in one."""
    folded = codes | _BIT
    brackets = np.flatnonzero((folded == _OPENING) | (folded == _CLOSING))
    inside = (np.searchsorted(quotes, brackets) + within) % 2 == 1
    return brackets[~inside], (len(quotes) + within) % 2 == 1


def _escaped(codes: Bytes) -> Int64:
    """Return positions right after an unescaped backslash: in a run every second backslash escapes."""
    at = np.flatnonzero(codes == _BACKSLASH)
    number = np.arange(len(at))
    begins = np.append(True, np.diff(at) != 1)
    first = np.maximum.accumulate(np.where(begins, number, 0))
    return at[(number - first) % 2 == 0] + 1
