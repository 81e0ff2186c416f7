"""A log in anonymous shared memory, through which processes of one sweep pass records to later ones.

The process that creates the log passes on its `path`; the memory is freed when that process ends. Results do
not depend on the log: if it cannot be read or written, it counts as empty.
"""

import contextlib
import fcntl
import os
import struct

_LENGTH = struct.Struct("<Q")
MOST_BYTES = 64 << 20
"""The size in bytes above which no record is added."""


class SharedLog:
    """A context manager that creates a log."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.path: str | None = None

    def __enter__(self) -> "SharedLog":
        try:
            self._descriptor = os.memfd_create("fsdpbench-shared")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        except (AttributeError, OSError):  # not Linux, or out of memory or descriptors
            self.path = None
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self.path = None


def records(path: str) -> list[bytes]:
    """Return all records in the log, in order."""
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
    """Append a record, for processes that read the log later."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) + len(record) <= MOST_BYTES:
            file.write(_LENGTH.pack(len(record)) + record)
            file.flush()
