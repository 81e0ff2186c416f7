"""Which files belong into the layer: those into which simulated tensors go.

A file that is opened to write bytes is written in the layer first. When it is closed it is known whether
tensors went in: `torch.save` says so of the file that it writes to; once tensors have been made bytes or
arrays in memory, any file may hold them. One without is put where the script wanted it.
"""

from __future__ import annotations

import io
import os
import shutil
import weakref
from typing import Any

from fsdpbench.script.files.layer import move
from fsdpbench.script.files.overlay import Overlay

_LOGS = ("tfevents",)


class Writing:
    """Files that are being written. `at_large`: bytes of tensors are in the process's memory."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.at_large = False
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, path: str, mode: str, buffering: int) -> Any:
        """The file `path` (resolved) in the layer, opened to write bytes."""
        overlay = self.overlay
        if "x" in mode and (overlay.has(path) or overlay.is_real(path)):
            raise FileExistsError(17, os.strerror(17), path)
        was_kept = overlay.has(path) or overlay.hides(path)
        if "a" in mode or "r" in mode:
            overlay.copy_up(path)
        raw = _Raw(overlay.place(path), mode.replace("b", "").replace("t", ""))
        raw.writing, raw.tainted, raw.name = self, was_kept, path
        file: Any = raw
        if buffering != 0:
            size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
            file = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        self._open.add(file)
        return file

    def holds_tensors(self, file: Any, *, alone: bool) -> None:
        """Tensors were written to an open file, or to an object that only looks like one; `alone`: no other
        file describes them."""
        raw = getattr(file, "raw", file)
        if isinstance(raw, _Raw):
            raw.tainted = True
        if not (alone and isinstance(raw, _Raw)):
            self.at_large = True

    def closed(self, path: str, *, tainted: bool) -> None:
        """A file is complete: put it where the script wanted it, unless it belongs into the layer."""
        overlay = self.overlay
        if tainted or not overlay.has(path):
            return
        if self.at_large and not any(word in os.path.basename(path) for word in _LOGS):
            return
        folder = os.path.dirname(path)
        is_new = folder in overlay.made or not overlay.is_real(folder)
        if is_new and _has_files(overlay.over(folder), but=os.path.basename(path)):
            return  # a part of the checkpoint there
        self._publish(path)

    def _publish(self, path: str) -> None:
        written = self.overlay.over(path)
        if self.overlay.is_real(path):
            with io.FileIO(written) as source, io.FileIO(path, "w") as target:
                shutil.copyfileobj(source, target)
            os.remove(written)
            return
        if not os.path.isdir(os.path.dirname(path)):
            return
        move(written, path)
        self.overlay.made.add(path)

    def close_all(self) -> None:
        """The script has ended; what it left open is complete now."""
        for file in list(self._open):
            if not file.closed:
                file.close()


class _Raw(io.FileIO):
    """A file that tells when it is closed. `name` is the one that the script gave."""

    writing: Writing
    tainted: bool

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.writing.closed(str(self.name), tainted=self.tainted)


def _has_files(folder: str, *, but: str) -> bool:
    """Whether a folder of the layer holds files, except one and marks of what is gone."""
    try:
        return any(
            entry.is_file() and entry.name != but and not entry.name.startswith(".gone.")
            for entry in os.scandir(folder)
        )
    except OSError:
        return False
