"""Preparation of a command's process: the locale and the standard streams."""

import contextlib
import os
import resource
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO

from fsdpbench.base import interruption
from fsdpbench.base.errors import BenchError


def begin() -> None:
    """Prepare the locale and standard streams of this process, and let it end with its parent."""
    if os.environ.get(interruption.PARENT):
        interruption.die_with_named_parent()
    _in_utf8()
    _open_streams()


_FILES = 56
"""The number of files that a command and a few workers open together; torch alone needs a dozen."""


def check_place() -> None:
    """Raise `BenchError` if the working folder was removed, or if torch could not open enough files."""
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
    """Restart in Python's UTF-8 mode if the locale is ASCII, because paths and text files depend on it."""
    if sys.getfilesystemencoding() not in ("utf-8", "utf8") and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        interruption.hold()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Open closed standard streams on /dev/null; replace stdout and stderr by `standard_stream`."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `number`
    sys.stdout = standard_stream(1, sys.stdout)
    sys.stderr = standard_stream(2, sys.stderr)


def standard_stream(number: int, old: TextIO | None) -> TextIOWrapper:
    """Return a stream on descriptor `number` that can write every character and survives a closed reader.
    It takes its encoding from `old`, Python's stream."""
    file = _Output(number, "wb", closefd=False)
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=old.encoding if old else "utf-8",
        errors="backslashreplace",
        line_buffering=number == 2 or file.isatty(),
        write_through=bool(getattr(old, "write_through", False)),
    )


class _Output(FileIO):
    """A standard stream. If its reader closes (`| head`), the command still runs to its own exit code."""

    def write(self, text: object) -> int:
        try:
            return super().write(text)  # type: ignore[arg-type]
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError) or self.fileno() == 2:
                return len(text)  # type: ignore[arg-type]
            raise BenchError(f"standard output: cannot be written ({error.strerror})") from None
