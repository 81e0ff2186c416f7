"""The bytes of a trace file in blocks, unpacked where they are gzip-compressed.

Unpacking releases Python's lock, so it runs on a thread of its own, a few blocks ahead of the decoder.
"""

from __future__ import annotations

import queue
import stat
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fsdpbench.reports.readers.trace import TraceError, TraceLimits, told_bytes

BLOCK_BYTES = 4 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_AHEAD = 3
_PATIENCE_S = 60.0
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FORMATS = {
    b"\x1f\x8b": "is gzip inside gzip: unpack it once",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "is packed by zstd: unpack it first",
    b"\xfd7zXZ": "is packed by xz: unpack it first",
    b"BZh": "is packed by bzip2: unpack it first",
    b"\x04\x22\x4d\x18": "is packed by lz4: unpack it first",
    b"\xff\xfe": "is UTF-16 text, and JSON is UTF-8: convert it first",
    b"\xfe\xff": "is UTF-16 text, and JSON is UTF-8: convert it first",
    b"{\x00": "is UTF-16 text, and JSON is UTF-8: convert it first",
    b"\x00{": "is UTF-16 text, and JSON is UTF-8: convert it first",
    b"SQLite format 3": "is an SQLite database (of nsys?), not a Kineto trace",
}
UTF8_MARK = b"\xef\xbb\xbf"
WHITE = b" \t\r\n"


def read_blocks(path: Path, limits: TraceLimits) -> Iterator[bytes]:
    """Yield the file's JSON, unpacked, in blocks of some megabytes, from its first bracket on.

    Raises:
        TraceError: missing, unreadable or empty; damaged or truncated gzip data; more than the limit
            `unpacked`; something that does not begin as JSON does.
    """
    total = 0
    begun = False
    try:
        with open_file(path) as file:
            compressed = file.read(2) == _GZIP_MAGIC
            if not compressed and path.stat().st_size > limits.unpacked:
                raise TraceError(path, limits.refusal("unpacked", _size(path, compressed, limits)))
            file.seek(0)
            blocks = _ahead(path, _unpack(path, file)) if compressed else _plain(file)
            for block in blocks:
                total += len(block)
                if total > limits.unpacked:
                    raise TraceError(path, limits.refusal("unpacked", _size(path, compressed, limits)))
                if not begun and total - len(block) > limits.event:
                    found = f"begins with more than {told_bytes(limits.event)} of white space"
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
    """Return a regular file that is not empty, opened. Everything else is refused, pipes before they block.

    Raises:
        TraceError: it is something else.
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


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _size(path: Path, compressed: bool, limits: TraceLimits) -> str:
    size = told_bytes(path.stat().st_size)
    return f"unpacks from {size} to more than {told_bytes(limits.unpacked)}" if compressed else f"has {size}"


def _beginning(path: Path, block: bytes, *, first: bool) -> bytes:
    """Return the block from the file's first bracket on; empty where it is all white space."""
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
    """Yield all members of a gzip file; a file that ends before its last member does is truncated."""
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
    """Return how much to read at a time: little, since what follows a member's end is copied with each."""
    return max(BLOCK_BYTES // 32, 16)


def _ahead(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same blocks, made on another thread; its exception, if any, is raised here."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
    stopped = threading.Event()

    def put(item: bytes | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for block in blocks:
                put(block)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="unpack-trace", daemon=True)
    thread.start()
    try:
        while (item := ready.get(timeout=_PATIENCE_S)) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    except queue.Empty:
        raise TraceError(path, f"gives no data for {_PATIENCE_S:.0f} s: is its file system there?") from None
    finally:
        stopped.set()
        thread.join(_PATIENCE_S)
