"""Writes into what is at a path already and is not a plain file, without waiting for ever."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

_READER_PATIENCE_S = 10.0
_POLL_S = 0.02


def is_written_into(path: Path) -> bool:
    """Whether `path` is a link, a device or a pipe, which a new file must not replace."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def write_into(path: Path, content: bytes) -> None:
    """Write to what is at `path`. Raises `OSError`, also for a pipe without a reader."""
    with os.fdopen(_opened(path), "wb") as file:
        file.write(content)


def _opened(path: Path) -> int:
    """A handle that blocks from here on: a reader may take its time (`| less`)."""
    ends = time.monotonic() + _READER_PATIENCE_S
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            handle = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(path.stat().st_mode):
                raise
            if time.monotonic() > ends:
                raise OSError(errno.ENXIO, "no process reads this pipe", str(path)) from None
            time.sleep(_POLL_S)
        else:
            os.set_blocking(handle, True)
            return handle
