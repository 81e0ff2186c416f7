"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "FSDPBENCH_PARENT"
"""Environment variable by which a process that is started afresh learns the number of its parent."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Be killed when the thread that started this process ends. Linux only; elsewhere nothing happens.

    `parent`: its process; where this one has another already, that has ended before it could be followed.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def die_with_named_parent() -> None:
    """The same in a process that was started afresh, by a parent that may have left its number."""
    number = os.environ.pop(PARENT, "")
    die_with_parent(int(number) if number.isdecimal() else None)
