"""The one place that opens files for writing (`tests/docs/test_writers.py`): none through a link.

    write_whole   a file beside its place, renamed over what is there: a file, or a link, symbolic or hard
    write_new     the same where nothing is yet, whoever else writes there at the same moment
    replacing     the same for what writes its file itself
    append_to     a log: a link there makes room for a file
    remove        a link, not what it leads to

What a user names and is not a file (`/dev/stdout`, a device, a pipe) is written into, within seconds.
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
"""Where links lead to the standard streams of this process."""
_NO_REPLACE = 1
_AT_FDCWD = -100
_ASIDE = re.compile(r"^\..+\.(?P<pid>\d+)(?:@(?P<host>.+))?\.(?:partial|tmp)$")
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all, over what is there. Raises OSError."""
    # What no UTF-8 can say (bytes of a foreign path) is written as Python escapes it.
    encoded = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if is_written_into(path):
        with interruption.unwinding(), os.fdopen(_opened(path), "wb") as into:
            into.write(encoded)
        return
    with interruption.unwinding(), replacing(path) as aside, create(aside) as file:
        file.write(encoded)


@contextlib.contextmanager
def replacing(path: Path, ending: str = ".partial") -> Iterator[Path]:
    """Yield a name beside `path` that is this process's own; the file written there replaces `path`."""
    with own_name(path, ending) as aside:
        yield aside
        os.replace(aside, path)


@contextlib.contextmanager
def own_name(path: Path, ending: str = ".partial") -> Iterator[Path]:
    """Yield a name beside `path` that is this process's own; a file left there is removed."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{os.getpid()}@{host()}{ending}")
    try:
        yield aside
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def create(path: Path) -> BinaryIO:
    """Create a file where nothing is, not even a link, and return it. Raises `OSError`."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


def append_to(path: Path) -> int:
    """Return a handle to add to a log; all there but a file with one name is replaced. Raises `OSError`."""
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
    """Remove a folder, a file or a link, if it is there and lets itself be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def host() -> str:
    """Return this machine's name, as a part of a file's name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:64]


def is_written_into(path: Path) -> bool:
    """Return whether `path` is a standard stream, a device or a pipe, which a new file must not replace."""
    if path.is_symlink():
        return str(path.absolute().parent) in _STREAMS
    return path.exists() and not path.is_file()


def _opened(path: Path) -> int:
    """Return a handle that blocks from here on: a reader may take its time (`| less`). Raises `OSError`, also
    for a pipe without a reader."""
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
    """Write `content` to `path` where nothing is yet. Raises `FileExistsError`, or another `OSError`."""
    with interruption.unwinding(), own_name(path) as aside:
        with create(aside) as file:
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
    """Rename on file systems without hard links (Linux). Raise `OSError`."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
    old, new = os.fsencode(source), os.fsencode(path)
    if library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _NO_REPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
