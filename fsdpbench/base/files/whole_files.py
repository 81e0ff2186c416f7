"""Files that appear whole or not at all, whoever else writes them at the same moment."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from pathlib import Path

from fsdpbench.base import interruption, writing

_NO_REPLACE = 1
_AT_FDCWD = -100
_ASIDE = re.compile(r"^\..+\.(?P<pid>\d+)(?:@(?P<host>.+))?\.(?:partial|tmp)$")
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, instead of what is there. Raises `OSError`."""
    with interruption.unwinding():
        writing.write_whole(path, content)


def write_new(path: Path, content: bytes) -> None:
    """Write `content` to `path` where nothing is yet. Raises `FileExistsError`, or another `OSError`."""
    with interruption.unwinding(), writing.own_name(path) as aside:
        with writing.create(aside) as file:
            file.write(content)
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
        if found and found["host"] in (None, writing.host()) and not _lives(int(found["pid"])):
            with contextlib.suppress(OSError):
                path.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _rename_new(source: Path, path: Path) -> None:
    """Rename on file systems without hard links (Linux). Raise `OSError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
    old, new = os.fsencode(source), os.fsencode(path)
    if library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NO_REPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
