"""Checkpoints of a script through the layer: `torch.save` and `torch.load`, safetensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.script.files.overlay import Overlay
from fsdpbench.script.files.writing import Writing
from fsdpbench.script.numbers import plain
from fsdpbench.sim.torch_device.accelerator import Accelerator

_SHARDED = "torch.distributed.checkpoint"


def _with_plain_numbers(value: Any) -> Any:
    """The same containers, with numbers that any reader knows instead of followed ones."""
    if type(value) in (list, tuple):
        return type(value)(map(_with_plain_numbers, value))
    if type(value) is dict:
        return {key: _with_plain_numbers(each) for key, each in value.items()}
    return plain(value)


class Checkpoints:
    """`replace(owner, name, wrapper)` puts a function in another's place while the script runs."""

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
        """From now on checkpoints go through the layer."""
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
        """Asked of each storage that is saved."""

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
        """Its files are written and read in Rust."""
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
