"""What Python does with memory of the host past torch's operators: pinning it, and reading it.

The sanitizer has to know of such reads: they may come before a copy from the device is done.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.pinned import is_pinned as lies_in_pinned_memory
from fsdpbench.sim.torch_device.pinned import pinned_copy
from fsdpbench.sim.torch_device.strict.words import legacy_type
from fsdpbench.sim.torch_device.tensors import is_on_device
from fsdpbench.torch_internals import replace, tree_leaves


def install_host_access() -> None:
    """Patch `Tensor.pin_memory`, `is_pinned`, `tolist`, `numpy` and `torch.save`."""
    _patch_pinning()
    _patch_reads()


def _patch_pinning() -> None:
    tensor_type = torch.Tensor
    original_pin, original_is_pinned = tensor_type.pin_memory, tensor_type.is_pinned

    def pin_memory(self: torch.Tensor, *args: Any) -> torch.Tensor:
        if self.device.type == "cpu" and ACCELERATOR.started:
            return pinned_copy(self)
        if is_on_device(self):
            raise RuntimeError(f"cannot pin '{legacy_type(self)}' only dense CPU tensors can be pinned")
        return original_pin(self, *args)

    def is_pinned(self: torch.Tensor, *args: Any) -> bool:
        return lies_in_pinned_memory(self) if ACCELERATOR.started else original_is_pinned(self, *args)

    replace(tensor_type, pin_memory=pin_memory, is_pinned=is_pinned)


def _patch_reads() -> None:
    tensor_type = torch.Tensor
    original_tolist, original_numpy, original_save = tensor_type.tolist, tensor_type.numpy, torch.save

    def tolist(self: torch.Tensor) -> Any:
        _read(self, "Tensor.tolist")
        return original_tolist(self.cpu() if is_on_device(self) else self)

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _read(self, "Tensor.numpy")
        return original_numpy(self, *args, **kwargs)

    @functools.wraps(original_save)
    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        if ACCELERATOR.sanitizer is not None:
            for value in tree_leaves(obj):
                _read_saved(value)
        original_save(obj, *args, **kwargs)

    replace(tensor_type, tolist=tolist, numpy=numpy)
    replace(torch, save=save)


def _read_saved(value: Any) -> None:
    """A tensor, or the storage of one: `pickle` saves those."""
    if isinstance(value, torch.storage.TypedStorage):
        value = value.untyped()
    if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
        value = torch.empty(0, dtype=torch.uint8).set_(value)
    if isinstance(value, torch.Tensor):
        _read(value, "torch.save")


def _read(tensor: torch.Tensor, name: str) -> None:
    if ACCELERATOR.sanitizer is not None and not is_on_device(tensor):
        ACCELERATOR.sanitizer.host_reads(tensor, name)
