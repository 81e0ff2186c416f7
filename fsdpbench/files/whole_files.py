"""Files that appear whole or not at all, whoever else writes them at the same moment."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

from fsdpbench import interruption
from fsdpbench.reports.writing import is_written_into, write_into

_NO_REPLACE = 1
_AT_FDCWD = -100
_ASIDE = re.compile(r"^\..+\.(?P<pid>\d+)(?:@(?P<host>.+))?\.(?:partial|tmp)$")
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, instead of what is there. Raises `OSError`."""
    if is_written_into(path):
        write_into(path, _encoded(content))
        return
    with _aside(path) as aside:
        aside.write_bytes(_encoded(content))
        os.replace(aside, path)


def write_new(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` where nothing is yet. Raises `FileExistsError`, or another `OSError`."""
    with _aside(path) as aside:
        with aside.open("wb") as file:
            file.write(_encoded(content))
            file.flush()
            os.fsync(file.fileno())
        move_new(aside, path)


def move_new(source: Path, path: Path) -> None:
    """Move a file to where nothing is. Raises `FileExistsError`, or another `OSError`."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(source, path)
    else:
        source.unlink()


def clear_leftovers(folder: Path) -> None:
    """Remove what writers in `folder` left that were killed."""
    for path in folder.glob(".*"):
        found = _ASIDE.match(path.name)
        if found and found["host"] in (None, _host()) and not _lives(int(found["pid"])):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A name beside `path` that is this process's own; what is there in the end is removed."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{os.getpid()}@{_host()}.partial")
    with interruption.unwinding():
        try:
            yield aside
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


def _encoded(content: str | bytes) -> bytes:
    # What no UTF-8 can say (bytes of a foreign path) is written as Python escapes it.
    return content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:64]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _rename_new(source: Path, path: Path) -> None:
    """For file systems without hard links (Linux)."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
    old, new = os.fsencode(source), os.fsencode(path)
    if library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NO_REPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
