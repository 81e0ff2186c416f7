"""The first moments of a command: the locale and the standard streams."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO

from fsdpbench.base import interruption
from fsdpbench.base.errors import BenchError


def begin() -> None:
    """Make of this process what a command needs."""
    _in_utf8()
    _open_streams()


_FILES = 56
"""Files that a command and a few workers open at the same time; torch alone needs a dozen."""


def check_place() -> None:
    """Raises `BenchError` where this process is in a folder that was removed, or may open too few files: not
    even torch starts there."""
    (soft, hard), needed = resource.getrlimit(resource.RLIMIT_NOFILE), _FILES
    with contextlib.suppress(OSError):
        needed += len(os.listdir("/dev/fd"))
    if 0 <= soft < needed:
        if 0 <= hard < needed:
            raise BenchError(f"{soft} open files are the limit here, and {needed} are needed: ulimit -n 1024")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        os.getcwd()
    except OSError:
        raise BenchError("the folder it was started in was removed; change to another") from None


def _in_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale knows ASCII alone: paths with other letters, and
    every text file, would depend on it."""
    if sys.getfilesystemencoding() not in ("utf-8", "utf8") and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        interruption.hold()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Standard streams that are there, write every character, and do not mind a reader that went away."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    sys.stdout = standard_stream(1, sys.stdout)
    sys.stderr = standard_stream(2, sys.stderr)


def standard_stream(number: int, old: TextIO | None) -> TextIOWrapper:
    """The stream of that number, instead of Python's own (`old`)."""
    file = _Output(number, "wb", closefd=False)
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=old.encoding if old else "utf-8",
        errors="backslashreplace",
        line_buffering=number == 2 or file.isatty(),
        write_through=bool(getattr(old, "write_through", False)),
    )


class _Output(FileIO):
    """A standard stream. Its reader may go away (`| head`): the command continues to its own exit code."""

    def write(self, text: object) -> int:
        try:
            return super().write(text)  # type: ignore[arg-type]
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError) or self.fileno() == 2:
                return len(text)  # type: ignore[arg-type]
            raise BenchError(f"standard output: cannot be written ({error.strerror})") from None
