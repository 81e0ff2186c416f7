"""Records that processes of one sweep leave for later ones, in memory that has no name on a disk.

The process that makes it passes on `path`; it and its memory are gone with that process. No result depends
on it: where it cannot be read or written, it is empty.
"""

import contextlib
import fcntl
import os
import struct

_LENGTH = struct.Struct("<Q")
MOST_BYTES = 64 << 20
"""The size from which no record is added."""


class SharedLog:
    """A log, made here; use as a context."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.path: str | None = None

    def __enter__(self) -> "SharedLog":
        try:
            self._descriptor = os.memfd_create("fsdpbench-shared")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        except (AttributeError, OSError):  # not Linux, or none is to be had
            self.path = None
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self.path = None


def records(path: str) -> list[bytes]:
    """Return all records so far, in order."""
    try:
        with open(path, "rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH)
            content = file.read()
    except OSError:
        return []
    found, at = [], 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if at + length > len(content):
            break  # its writer died
        found.append(content[at : at + length])
        at += length
    return found


def add_record(path: str, record: bytes) -> None:
    """Add a record for processes that read from now on."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) + len(record) <= MOST_BYTES:
            file.write(_LENGTH.pack(len(record)) + record)
            file.flush()
