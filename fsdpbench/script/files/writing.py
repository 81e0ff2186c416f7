"""The files that belong into the layer: those with simulated tensors; and a script's checkpoints.

A file that is opened to write bytes is written in the layer first. When it is closed it is known whether
tensors went in: `torch.save` marks the file that it writes to; once tensors have become bytes or arrays in
memory, any file may hold them. A file without tensors is moved to the place where the script wanted it.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.script.files.overlay import Overlay, move
from fsdpbench.script.numbers import plain
from fsdpbench.sim.torch_device.accelerator import Accelerator

_LOGS = ("tfevents",)


class Writing:
    """The files that are being written. `at_large`: bytes of tensors are in the process's memory."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.at_large = False
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, path: str, mode: str, buffering: int) -> Any:
        """Open the file `path` (resolved) in the layer to write bytes."""
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
        """Note that tensors were written to an open file, or to an object that only looks like one; `alone`:
        no other file describes them."""
        raw = getattr(file, "raw", file)
        if isinstance(raw, _Raw):
            raw.tainted = True
        if not (alone and isinstance(raw, _Raw)):
            self.at_large = True

    def closed(self, path: str, *, tainted: bool) -> None:
        """Move a complete file to the place where the script wanted it, unless it belongs into the layer."""
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
        """Close the files that the script left open when it ended: they are complete now."""
        for file in list(self._open):
            if not file.closed:
                file.close()


class _Raw(io.FileIO):
    """A file that reports when it is closed. `name` is the one that the script gave."""

    writing: Writing
    tainted: bool

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.writing.closed(str(self.name), tainted=self.tainted)


def _has_files(folder: str, *, but: str) -> bool:
    """Return whether a folder of the layer holds files, except `but` and marks of removed ones."""
    try:
        return any(
            entry.is_file() and entry.name != but and not entry.name.startswith(".gone.")
            for entry in os.scandir(folder)
        )
    except OSError:
        return False


_SHARDED = "torch.distributed.checkpoint"


def _with_plain_numbers(value: Any) -> Any:
    """Return the containers with plain numbers instead of followed ones, which no other reader knows."""
    if type(value) in (list, tuple):
        return type(value)(map(_with_plain_numbers, value))
    if type(value) is dict:
        return {key: _with_plain_numbers(each) for key, each in value.items()}
    return plain(value)


class Checkpoints:
    """The wrappers of `torch.save`, `torch.load` and safetensors' functions.

    `replace(owner, name, wrapper)` puts a function in another's place while the script runs.
    """

    def __init__(
        self,
        overlay: Overlay,
        writing: Writing,
        replace: Callable[[Any, str, Callable[[Any], Any]], None],
        accelerator: Accelerator,
    ) -> None:
        self._accelerator = accelerator
        self._overlay = overlay
        self._writing = writing
        self._replace = replace
        self._saw_storage = False

    def install(self) -> None:
        """Let checkpoints go through the layer from now on."""
        for module in (torch, torch.serialization):
            self._replace(module, "save", self._saving)
            self._replace(module, "load", self._loading)
        self._replace(torch.serialization, "location_tag", self._seen)
        for name in ("numpy", "__array__"):
            self._replace(torch.Tensor, name, self._array)
        self._install_safetensors()

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        overlay = self._overlay

        def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
            obj = _with_plain_numbers(obj)
            before, self._saw_storage = self._saw_storage, False
            try:
                if isinstance(f, (str, os.PathLike)) and overlay.concerns(f):
                    path = overlay.resolve(f)
                    was_there = overlay.has(path) or overlay.hides(path)
                    original(obj, overlay.place(path), *args, **options)
                    self._writing.closed(path, tainted=self._saw_storage or was_there)
                else:
                    original(obj, f, *args, **options)
                    if self._saw_storage:
                        caller = str(sys._getframe(1).f_globals.get("__name__"))
                        self._writing.holds_tensors(f, alone=not caller.startswith(_SHARDED))
            finally:
                self._saw_storage = before or self._saw_storage

        return save

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, *args: Any, **options: Any) -> Any:
            path = self._overlay.visible(f) if isinstance(f, (str, os.PathLike)) else f
            return original(path, *args, **options)

        return load

    def _seen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function called for each storage that is saved."""

        def location_tag(storage: Any) -> Any:
            self._saw_storage = True
            return original(storage)

        return location_tag

    def _array(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def array(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if self._accelerator.copied_to_host:
                self._writing.at_large = True
            return original(tensor, *args, **options)

        return array

    def _install_safetensors(self) -> None:
        """Wrap safetensors' functions, whose files are written and read in Rust."""
        try:
            import safetensors
        except ImportError:
            return
        overlay = self._overlay

        def writing(original: Callable[..., Any]) -> Callable[..., Any]:
            def serialize_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> Any:
                return original(tensors, overlay.place(overlay.resolve(filename)), *args, **options)

            return serialize_file

        def reading(original: Any) -> Callable[..., Any]:
            def safe_open(filename: Any, *args: Any, **options: Any) -> Any:
                return original(overlay.visible(filename), *args, **options)

            return safe_open

        self._replace(safetensors, "serialize_file", writing)
        self._replace(safetensors, "safe_open", reading)
