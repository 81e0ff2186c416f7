"""Which files are the script's own: beside it or in its package, and not installed there."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fsdpbench
from fsdpbench.configuration.script_source import ScriptSource

_INSTALLED = ("site-packages", "dist-packages")
_PACKAGE = os.path.dirname(fsdpbench.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Python's library and this project, which may lie below the script's folder too.
_NOT_THE_SCRIPTS = (_PYTHON, _PACKAGE)


class OwnFiles:
    """Asks of files by their names, as code objects have them."""

    def __init__(self, source: ScriptSource) -> None:
        self._script = source.path
        self._folder = str(source.own_folder) + os.sep
        self._whole = str(Path(source.path).absolute())
        self._known: dict[str, bool] = {}

    def whole_name(self, name: str) -> str:
        """The name of a file of the script's own from the root on; the script may have changed folders."""
        return self._whole if name == self._script else name

    def has(self, name: str) -> bool:
        """Whether `name` is a file of the script's own."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._is_own(name)
        return known

    def seen(self) -> list[str]:
        """Files of the script's own that were asked for, by the names that code has them under."""
        return [self._script, *(name for name, own in self._known.items() if own and name != self._script)]

    def line(self) -> str | None:
        """The script's own line that runs, as `train.py:12`."""
        frame = self.innermost()
        return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def _is_own(self, name: str) -> bool:
        if name == self._script:
            return True
        if not name.startswith(self._folder) or name.startswith(_NOT_THE_SCRIPTS):
            return False
        return not any(part in name[len(self._folder) :].split(os.sep) for part in _INSTALLED)

    def place(self, frame: FrameType | None) -> dict[str, Any]:
        """`file`, `line` and `text` that run in a frame, and the `span` of the call there: its first and last
        line, and its columns in bytes."""
        if frame is None:
            return {"file": "", "line": 0, "text": ""}
        code = frame.f_code
        file = self.whole_name(code.co_filename)
        span = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,))
        text = linecache.getline(file, frame.f_lineno).strip()
        return {"file": file, "line": frame.f_lineno, "text": text, "span": None if None in span else [*span]}

    def innermost(self) -> FrameType | None:
        """The frame of the script's own that runs; where there is none, the innermost of a library that is
        installed, but torch."""
        frame: FrameType | None = sys._getframe(1)
        library = None
        while frame is not None:
            name = frame.f_code.co_filename
            if self.has(name):
                return frame
            installed = any(f"{os.sep}{part}{os.sep}" in name for part in _INSTALLED)
            if library is None and installed and not name.startswith((_PACKAGE, _TORCH)):
                library = frame
            frame = frame.f_back
        return library
