"""Which side each rank is on, in a file: what is left to read of a rank that ended, or that hangs."""

from __future__ import annotations

import os
from pathlib import Path

_SIZE = 64
"""Bytes a rank."""


class Trail:
    """Written by one rank before each thing that it does.

    Args:
        path: one file of all ranks; "" to write nothing.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank
        self._file = os.open(path, os.O_RDWR) if path else -1

    def enter(self, side: str, index: int, what: str) -> None:
        """The next thing is ``what`` of operation ``index``, on ``side``."""
        if self._file >= 0:
            text = f"{side} {index} {what}".encode()[:_SIZE].ljust(_SIZE)
            os.pwrite(self._file, text, self._rank * _SIZE)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def last_steps(path: Path, ranks: int) -> list[str]:
    """What each rank wrote last, "" of one that wrote nothing."""
    content = path.read_bytes().ljust(ranks * _SIZE)
    return [content[n * _SIZE : (n + 1) * _SIZE].decode().strip("\0 ") for n in range(ranks)]
