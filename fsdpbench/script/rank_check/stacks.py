"""Where a collective was called: the script's own lines, innermost first, then those of libraries beneath."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType, TracebackType

import fsdpbench
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.rank_check.calls import Frame, Stack

_PACKAGE = os.path.dirname(fsdpbench.__file__) + os.sep
_OF_THE_BENCH = tuple(_PACKAGE + name + os.sep for name in ("script", "sim", "launch", "devices"))
_NOT_SHOWN = (*_OF_THE_BENCH, os.path.dirname(os.__file__) + os.sep, "<frozen")
_MOST_OWN, _MOST_LIBRARY = 20, 8


class Stacks:
    """Takes stacks; equal ones are one object."""

    def __init__(self, own_files: OwnFiles) -> None:
        self._own_files = own_files
        self._known: dict[tuple[tuple[object, int], ...], Stack] = {}

    def here(self) -> Stack:
        """The stack of the caller, without the bench's own frames."""
        lines = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            lines.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(lines)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._stack(
                [(code.co_filename, line, code.co_qualname) for code, line in lines]
            )
        return found

    def of_traceback(self, trace: TracebackType | None) -> Stack:
        """Where an exception was raised."""
        entries = traceback.extract_tb(trace)
        return self._stack([(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(entries)])

    def of_frame(self, frame: FrameType | None) -> Stack:
        """Where a frame stands."""
        entries = traceback.extract_stack(frame)
        return self._stack([(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(entries)])

    def _stack(self, innermost_first: list[tuple[str, int, str]]) -> Stack:
        own, library = [], []
        for file, line, function in innermost_first:
            if self._own_files.has(file):
                own.append(Frame(self._own_files.whole_name(file), line, function, own=True))
            elif not own and ("site-packages" in file or not file.startswith(_NOT_SHOWN)):
                library.append(Frame(file, line, function, own=False))
        return (*own[:_MOST_OWN], *library[:_MOST_LIBRARY])
