"""The files that each rank leaves besides its record: its logs, and where it stood when it was stopped.

    FOLDER/logs/  rank0_stdout.log  rank0_stderr.log  rank0_stopped.txt  rank0_error.json ...

`rank{r}_stopped.txt` gets the stacks of a rank that is asked to end. A rank that left neither a record nor
stacks was not asked: it died by itself.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from fsdpbench.base.reading import read_tail
from fsdpbench.base.writing import append_to

LOG_FOLDER = "logs"
_TAIL_BYTES = 1 << 16


class RankFiles:
    """Paths of one rank's files in a configuration's folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        begin = f"{LOG_FOLDER}/rank{rank}_"
        self.stdout, self.stderr = folder / f"{begin}stdout.log", folder / f"{begin}stderr.log"
        self.stopped, self.error = folder / f"{begin}stopped.txt", folder / f"{begin}error.json"

    @property
    def log_name(self) -> str:
        """Return the rank's error log relative to the configuration's folder."""
        return self.stderr.relative_to(self.folder).as_posix()

    def was_stopped(self) -> bool:
        """Return whether the rank was asked to end (and had not ended before)."""
        return bool(read_tail(self.stopped, _TAIL_BYTES))

    def error_lines(self) -> list[str]:
        """Return the last lines of its error log that are not blank."""
        return [line.strip() for line in read_tail(self.stderr, _TAIL_BYTES).splitlines() if line.strip()]

    def place(self) -> str | None:
        """Return the main thread's innermost frame when the rank was stopped: `barrier (x.py:12)`."""
        return innermost_frame(read_tail(self.stopped, _TAIL_BYTES))

    def remove_empty(self) -> None:
        for path in (self.stdout, self.stderr, self.stopped):
            if path.exists() and path.stat().st_size == 0:
                path.unlink()


_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')


_INSTALLED = re.compile(rf"/(?:site|dist)-packages/|<|{re.escape(os.path.dirname(os.__file__))}/")
_OURS = f"{Path(__file__).parents[1]}/"


def innermost_frame(stacks: str) -> str | None:
    """Return the innermost frame of a `faulthandler` dump's last thread, which is the main thread, and the
    line of a file that is not installed from which it came. Of this project's frames those are passed over.
    """
    _, _, main = stacks.rpartition("(most recent call first):")
    frames = [match for line in main.splitlines() if (match := _FRAME.match(line))]
    others = [each for each in frames if not each["file"].startswith(_OURS)]
    own = [each for each in others if not _INSTALLED.search(each["file"])]
    shown = dict.fromkeys([*(others if own else frames)[:1], *own[:1]])
    words = [f"{each['function']} ({Path(each['file']).name}:{each['line']})" for each in shown]
    return ", from ".join(words) or None


def how_it_ended(exit_code: int | None) -> str:
    """Return how a process ended, in words; None: its exit code is not known."""
    if exit_code is None:
        return "died without a message"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def log_to(folder: Path) -> None:
    """Send what this process says to the logs in `folder`. Raises `FileNotFoundError` if that is gone."""
    for stream, name in ((sys.stdout, "stdout.log"), (sys.stderr, "stderr.log")):
        stream.flush()
        handle = append_to(folder / name)
        os.dup2(handle, stream.fileno())
        os.close(handle)
