"""The bytes of a trace file in blocks, unpacked where they are gzip-compressed.

Unpacking releases Python's lock, so it runs on a thread of its own, a few blocks ahead of the decoder.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from reports.trace.model import TraceError

BLOCK_BYTES = 4 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_AHEAD = 3
_PATIENCE_S = 60.0


def read_blocks(path: Path) -> Iterator[bytes]:
    """The file's content, unpacked, in blocks of some megabytes.

    Raises:
        TraceError: missing, unreadable or empty; damaged or truncated gzip data.
    """
    with _open(path) as file:
        compressed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        if compressed:
            yield from _ahead(path, _unpack(path, file))
        else:
            while block := file.read(BLOCK_BYTES):
                yield block


def _open(path: Path) -> BinaryIO:
    try:
        if path.stat().st_size == 0:
            raise TraceError(path, "is empty (0 bytes)")
        return path.open("rb")
    except IsADirectoryError:
        raise TraceError(path, "is a folder, not a trace file") from None
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})") from None


def _unpack(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """All members of a gzip file; a file that ends before its last member does is truncated."""
    stream = zlib.decompressobj(wbits=31)
    rest = b""
    found = False
    while True:
        packed = rest or file.read(BLOCK_BYTES // 8)
        if not packed:
            break
        if stream.eof:
            # Another member, or padding that gzip allows after the last one.
            if not packed.startswith(_GZIP_MAGIC):
                break
            stream = zlib.decompressobj(wbits=31)
        try:
            block = stream.decompress(packed, BLOCK_BYTES)
        except zlib.error as error:
            raise TraceError(path, f"is damaged: its gzip data cannot be unpacked ({error})") from None
        rest = stream.unused_data if stream.eof else stream.unconsumed_tail
        if block:
            found = True
            yield block
    if not stream.eof:
        raise TraceError(path, "is truncated: its gzip data end in the middle; record or copy it again")
    if not found:
        raise TraceError(path, "is empty (a gzip file with nothing in it)")


def _ahead(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same blocks, made on another thread; its exception, if any, is raised here."""
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
