"""The only module that opens files for writing (`tests/docs/test_writers.py`). It never follows links.

    write_whole   write a temporary file, then rename it over the path: a file, or a link, symbolic or hard
    write_new     the same, but only if the path does not exist, without races
    replacing     the same for code that writes the temporary file itself
    append_to     append to a log; a link there is replaced by a file
    remove        remove a link, not its target

A path that is not a regular file (`/dev/stdout`, a pipe) is written directly, within `_READER_PATIENCE_S`.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fsdpbench.base import interruption

_READER_PATIENCE_S = 10.0
_POLL_S = 0.02
_STREAMS = ("/dev", "/dev/fd", "/proc/self/fd")
"""Folders with links to the standard streams of this process."""
_NO_REPLACE = 1
_AT_FDCWD = -100
_ASIDE = re.compile(r"^\..+\.(?P<pid>\d+)(?:@(?P<host>.+))?\.(?:partial|tmp)$")
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` atomically, over an existing file. Raises `OSError`."""
    # Characters that UTF-8 cannot encode (bytes of a foreign path) are written as Python's escapes.
    encoded = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if is_written_into(path):
        with interruption.unwinding(), os.fdopen(_opened(path), "wb") as into:
            into.write(encoded)
        return
    with interruption.unwinding(), replacing(path) as aside, create(aside) as file:
        file.write(encoded)


@contextlib.contextmanager
def replacing(path: Path, ending: str = ".partial") -> Iterator[Path]:
    """Yield a temporary path beside `path`; the file that the caller writes there replaces `path`."""
    with own_name(path, ending) as aside:
        yield aside
        os.replace(aside, path)


@contextlib.contextmanager
def own_name(path: Path, ending: str = ".partial") -> Iterator[Path]:
    """Yield a temporary path beside `path`, unique to this process; remove the file that is left there."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{os.getpid()}@{host()}{ending}")
    try:
        yield aside
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def create(path: Path) -> BinaryIO:
    """Create a file and return it, if nothing exists at `path`, not even a link. Raises `OSError`."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


def append_to(path: Path) -> int:
    """Return a handle that appends to a log; replace anything but a file with one name. Raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        handle = os.open(path, flags, 0o644)
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return handle
        os.close(handle)
    remove(path)
    return os.open(path, flags | os.O_EXCL, 0o644)


def remove(path: Path) -> None:
    """Remove a folder, a file or a link; ignore errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def host() -> str:
    """Return this machine's host name in a form that fits into a file name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:64]


def is_written_into(path: Path) -> bool:
    """Return whether `path` is a standard stream, a device or a pipe, which must be written directly."""
    if path.is_symlink():
        return str(path.absolute().parent) in _STREAMS
    return path.exists() and not path.is_file()


def _opened(path: Path) -> int:
    """Return a blocking handle, because a reader may be slow (`| less`). Raises `OSError`, also for a pipe
    that has no reader within `_READER_PATIENCE_S`."""
    ends = time.monotonic() + _READER_PATIENCE_S
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            handle = os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(path.stat().st_mode):
                raise
            if time.monotonic() > ends:
                raise OSError(errno.ENXIO, "no process reads this pipe", str(path)) from None
            time.sleep(_POLL_S)
        else:
            os.set_blocking(handle, True)
            return handle


def write_new(path: Path, content: bytes) -> None:
    """Write `content` to `path` if nothing exists there. Raises `FileExistsError`, or another `OSError`."""
    with interruption.unwinding(), own_name(path) as aside:
        with create(aside) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        move_new(aside, path)


def move_new(source: Path, path: Path) -> None:
    """Move a file to a path that does not exist. Raises `FileExistsError`, or another `OSError`."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(source, path)
    else:
        source.unlink()


def clear_leftovers(folder: Path) -> None:
    """Remove temporary files of killed writers from `folder`."""
    for path in folder.glob(".*"):
        found = _ASIDE.match(path.name)
        if found and found["host"] in (None, host()) and not _lives(int(found["pid"])):
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
    """Rename without replacing, for file systems without hard links (Linux). Raise `OSError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
    old, new = os.fsencode(source), os.fsencode(path)
    if library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NO_REPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
