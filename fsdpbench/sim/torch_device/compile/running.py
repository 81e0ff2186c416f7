"""What the wrapper of a compiled graph calls, beside its kernels and torch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, DEVICE_TYPE
from fsdpbench.sim.torch_device.compile.plan import Launch, Plan
from fsdpbench.sim.torch_device.tensors import contiguous_strides, new_tensor, new_view
from fsdpbench.torch_internals import assert_size_stride


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A buffer of the graph; strides in elements. Raises torch.OutOfMemoryError."""
    accelerator = ACCELERATOR
    if accelerator.backward.is_active:
        accelerator.backward.arrive()
    accelerator.timeline.cpu += accelerator.cpu_costs.view_ns
    shape, strides = tuple(size), tuple(stride)
    elements = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    laid_out = None if strides == contiguous_strides(shape) else strides
    return new_tensor(shape, laid_out, dtype, elements * dtype.itemsize)


def reinterpret(
    base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """The memory of a buffer, seen in another geometry; ``offset`` in elements, from the buffer's own."""
    return new_view(base, size, stride, int(base.storage_offset()) + offset, base.dtype)


def device(*args: Any, **kwargs: Any) -> torch.device:
    """`torch.device`, where the graph says "cuda" for the device that it was compiled for."""
    made = torch.device(*args, **kwargs)
    return made if made.type == "cpu" else torch.device(DEVICE_TYPE, made.index or 0)


def raw_stream(index: int) -> int:
    """The current stream; launches look it up themselves."""
    return ACCELERATOR.stream


def check_sizes(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], name: str = "") -> None:
    """The wrapper's check of what an operator returned. Convolutions have the strides of the library, which
    the compiler of a build without CUDA does not know."""
    if "convolution" not in name:
        assert_size_stride(tensor, size, stride, name)
    elif tuple(tensor.shape) != tuple(size):
        raise AssertionError(f"{name}: {tuple(tensor.shape)} instead of {tuple(size)}")


def aligned(*args: Any) -> Any:
    """Alignment is what the allocator gives: every block begins at a multiple of 512 bytes."""
    return args[0]


__all__ = ["Launch", "Plan", "aligned", "check_sizes", "device", "empty_strided", "raw_stream", "reinterpret"]
