"""Tensors of the device, their views and storages, and their counterparts on the meta device.

They are plain `torch.Tensor` objects (no subclass, no mode), like those of a real accelerator.

In torch's C++ a storage has zero bytes. A `StorageRecord` has its true size. The record is a weak reference
to the storage's Python object, which torch keeps alive as long as the C++ storage. Its callback frees the
simulated block when the storage really dies (even if autograd or views held it last). FSDP frees and
reallocates buffers with `storage.resize_`, which a patch routes here.
"""

import functools
import mmap
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from fsdpbench.base.errors import error_text
from fsdpbench.base.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    create_empty_tensor,
    reinterpret_tensor,
    set_storage_by_key,
)
from fsdpbench.sim.model.allocator import Block, CachingAllocator, SimOutOfMemoryError
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, DEVICE_TYPE

_META = DispatchKey.Meta
_create: Any = create_empty_tensor
# Kernels of the meta device change only the geometry and accept any tensor: views share the storage of their
# base. `as_strided` reaches them if only their key is active (cheaper than a call with keys; since torch
# 2.11, a guard that includes a key would keep its device afterwards). Most views need no operator at all.
_Key: Any = DispatchKey
_Keys = DispatchKeySet
_ABOVE = (_Key.ADInplaceOrView, _Key.AutogradPrivateUse1, _Key.AutogradMeta, _Key.AutocastPrivateUse1)
_ONLY_META = (_Keys(_META), functools.reduce(operator.or_, map(_Keys, _ABOVE)))
_force_keys = ForceDispatchKeyGuard
_as_strided = torch.as_strided
_reinterpret = reinterpret_tensor
_inference_mode = torch.is_inference_mode_enabled
# torch's own getter: while a user's script runs, `device.type` reads "cuda" (`fsdpbench/script`).
_type_of: Any = torch.device.type.__get__  # type: ignore[attr-defined]
_set_storage = set_storage_by_key


def new_tensor(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, nbytes: int
) -> torch.Tensor:
    """Return a tensor with its own memory (`strides` None: contiguous). Raises `torch.OutOfMemoryError`."""
    tensor = _create(shape, dtype)
    attach(tensor.untyped_storage(), nbytes)
    return tensor if strides is None else _reinterpret(tensor, shape, strides, 0)


def new_view(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a view of the storage of `base`; `offset` and strides in elements of `dtype`."""
    if dtype is base.dtype:
        # `as_strided` handles inference mode: new tensors depend on the mode, views on their base.
        if not (base.is_inference() or _inference_mode()):
            return _reinterpret(base, shape, strides, offset - base.storage_offset())
        with _force_keys(*_ONLY_META):
            return _as_strided(base, shape, strides, offset)
    return _set_storage(_META, _create((0,), dtype), base.untyped_storage(), offset, shape, strides)


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of `tensor`, but with its own storage, as after DLPack."""
    nbytes = extent(tensor) * tensor.element_size()
    copy = _create((0,), tensor.dtype)
    offset = int(tensor.storage_offset()) * tensor.element_size()
    borrow(copy.untyped_storage(), tensor.untyped_storage(), offset, nbytes)
    return set_geometry(copy, copy.untyped_storage(), 0, tensor.shape, tensor.stride())


def set_geometry(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Set the storage and geometry of an existing tensor."""
    return _set_storage(_META, tensor, storage, offset, shape, strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides as torch computes them (dimensions of size 0 count as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the simulated device."""
    return _type_of(tensor.device) == DEVICE_TYPE


def is_simulated(device: torch.device) -> bool:
    """Return whether a device is the simulated one, under any name."""
    return _type_of(device) == DEVICE_TYPE


def extent(tensor: torch.Tensor) -> int:
    """Return the number of storage elements from a tensor's first to its last, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def meta_twin(value: Any) -> Any:
    """Return an argument for the meta device: replaces tensors, lists of tensors, and devices."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.dim() == 0:
            return value  # operators accept wrapped numbers and CPU scalars next to tensors of any device
        offset = value.storage_offset()
        if offset == 0:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        base = torch.empty((offset + extent(value),), dtype=value.dtype, device="meta")
        return base.as_strided(value.shape, value.stride(), offset)
    if isinstance(value, (list, tuple)):
        return [meta_twin(item) for item in value]
    if isinstance(value, torch.device) and is_simulated(value):
        return torch.device("meta")
    return value


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return all tensors in a call's arguments, in order, including those in lists."""
    found: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    if kwargs:
        found.extend(tensors_in(tuple(kwargs.values()), {}))
    return found


_RECORD = "_sim_record"


class Assumed(IntEnum):
    """How a value is known: for certain, as a guess (a balanced count), or as an assumed answer (`x > 0`)."""

    NO = 0
    GUESS = 1
    ANSWER = 2


class Known(NamedTuple):
    """Value of all elements, as a one-element host tensor (`known_values.py`)."""

    value: torch.Tensor
    assumed: Assumed


class Chosen(NamedTuple):
    """Each element is one of the numbers 0 to `among` - 1, as a router chose (`choices.py`)."""

    among: int


class Share(NamedTuple):
    """Share of elements that are not zero, and whether they are ones."""

    of_all: Fraction
    ones: bool


class Listed(NamedTuple):
    """Whole numbers in a row from the host (labels, a mask). `assumed`: whether they are a guess."""

    values: torch.Tensor
    assumed: Assumed = Assumed.NO


Choice = Chosen | Share | Listed


class StorageRecord(weakref.ref):
    """Size in bytes and block of a storage (None while it is empty), and its known values."""

    __slots__ = ("allocator", "block", "choice", "known", "nbytes", "symmetric")
    nbytes: int
    block: "Block | Lent | None"
    allocator: "CachingAllocator | Lent"
    known: Known | None
    choice: Choice | None
    symmetric: bool


class Lent:
    """Memory borrowed from another storage, as DLPack passes it; acts as both block and allocator.

    The lender lives as long as the borrowing storage.
    """

    def __init__(self, lender: torch.UntypedStorage, offset: int) -> None:
        self.lender: torch.UntypedStorage | None = lender
        self.offset = offset

    @property
    def address(self) -> int:
        start = None if self.lender is None else address(self.lender)
        return start + self.offset if start else 0

    def free(self, block: Any) -> None:
        """Release the lender, because the borrower has died."""
        self.lender = None

    def record_stream(self, block: Any, stream: int) -> None:
        """Keep the lender's memory until `stream` has reached this point."""
        record: Any = None if self.lender is None else record_of(self.lender)
        if record is not None and record.block is not None:
            record.allocator.record_stream(record.block, stream)


def _free(record: StorageRecord) -> None:
    """Free the block of a dead storage."""
    python = ACCELERATOR.python
    # Objects that die with a lender may run the program's Python code.
    paused = python.counting and not isinstance(record.block, Lent) and python.pause()
    try:
        if record.block is not None:
            record.allocator.free(record.block)  # type: ignore[arg-type]
            record.block = None
        forget(record)
    finally:
        if paused:
            python.resume()


def forget(record: StorageRecord | None) -> None:
    """Clear the known values of a storage that died or was written."""
    if record is not None and (record.known is not None or record.choice is not None):
        record.known = record.choice = None
        ACCELERATOR.known_values -= 1


def remember(record: StorageRecord, known: Known | None, choice: Choice | None) -> None:
    """Replace the knowledge about a storage's values."""
    forget(record)
    record.known, record.choice = known, choice
    ACCELERATOR.known_values += known is not None or choice is not None


def attach(storage: torch.UntypedStorage, nbytes: int) -> StorageRecord:
    """Give a new storage its size and memory. Raises `torch.OutOfMemoryError`."""
    record = StorageRecord(storage, _free)
    record.known = record.choice = None
    record.symmetric = False
    record.nbytes = nbytes
    record.allocator = ACCELERATOR.allocator
    record.block = allocate(nbytes) if nbytes else None
    storage._sim_record = record  # type: ignore[attr-defined]
    return record


def borrow(storage: torch.UntypedStorage, lender: torch.UntypedStorage, offset: int, nbytes: int) -> None:
    """Give a new storage `nbytes` of the lender's memory, starting at `offset`."""
    record = attach(storage, 0)
    record.nbytes = nbytes
    record.block = record.allocator = Lent(lender, offset)


def record_of(storage: torch.UntypedStorage) -> StorageRecord | None:
    """Return the record of a storage of the device, or None for any other storage."""
    return getattr(storage, _RECORD, None)


def resize(record: StorageRecord, nbytes: int) -> None:
    """Free the storage's memory and allocate `nbytes` (there are no contents)."""
    if nbytes == record.nbytes:
        return
    if isinstance(record.block, Lent):
        raise RuntimeError("Trying to resize storage that is not resizable: its memory came by DLPack")
    python = ACCELERATOR.python
    paused = python.counting and python.pause()
    try:
        block = allocate(nbytes) if nbytes else None
        if record.block is not None:
            record.allocator.free(record.block)
        forget(record)
    finally:
        if paused:
            python.resume()
    record.block = block
    record.nbytes = nbytes
    record.allocator = ACCELERATOR.allocator


def allocate(nbytes: int) -> Block:
    """Allocate on the current stream, or in the pool of the graph that is being captured.

    Raises `torch.OutOfMemoryError` with torch's own message.
    """
    accelerator = ACCELERATOR
    stream = accelerator.stream if accelerator.graph_pool is None else accelerator.graph_pool
    try:
        return accelerator.allocator.malloc(nbytes, stream)
    except SimOutOfMemoryError as error:
        message = str(error)
    # An error in an autograd hook would end the process, so the result is written first.
    if ACCELERATOR.on_out_of_memory is not None:
        ACCELERATOR.on_out_of_memory(message)
    raise torch.OutOfMemoryError(message)


def address(storage: torch.UntypedStorage) -> int | None:
    """Return the simulated address of a storage, 0 if it is empty, or None if it is on another device."""
    record = record_of(storage)
    if record is None:
        return None
    return 0 if record.block is None else record.block.address


def use_on_stream(tensor: torch.Tensor, stream: int) -> None:
    """Implement `Tensor.record_stream`: keep the memory until `stream` has reached this point."""
    record: Any = record_of(tensor.untyped_storage())
    if record is not None and record.block is not None:
        record.allocator.record_stream(record.block, stream)


# Pinned memory is marked on the storage of the host tensor, which torch's CPU allocator created. Copies of it
# do not block the CPU; all other host copies do.
_MARK = "_sim_pinned"
_MAP_NORESERVE = 0x4000  # in `mmap` since Python 3.13
LARGE_ON_HOST = 1 << 20
"""Bytes. Smaller host tensors are always computed with: skipping an operator would take as long."""


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a host tensor's memory as pinned and return the tensor. Raises `torch.OutOfMemoryError`."""
    for part in with_memory(tensor):
        storage: Any = part.untyped_storage()
        if not hasattr(storage, _MARK):
            _take_pinned(storage)
        storage._sim_pinned = True
    return tensor


def _take_pinned(storage: Any) -> None:
    held = ACCELERATOR.host
    held.hand_out(nbytes := 1 << max(0, storage.nbytes() - 1).bit_length())  # torch's rounding
    weakref.finalize(storage, held.take_back, nbytes)
    _check_host("pinned memory")


def take_pageable(tensor: torch.Tensor) -> torch.Tensor:
    """Count a host tensor's memory until it is freed; return the tensor. Raises `torch.OutOfMemoryError`."""
    storage, held = tensor.untyped_storage(), ACCELERATOR.host.pageable
    held.increase(storage.nbytes())
    weakref.finalize(storage, held.increase, -storage.nbytes())
    _check_host("memory")
    return tensor


def _check_host(kind: str) -> None:
    taken, most = ACCELERATOR.host.bytes_held, ACCELERATOR.host.most
    if taken > most:
        raise torch.OutOfMemoryError(error_text("tensors.host_memory", taken / 1e9, kind, most / 1e9))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a host tensor is in pinned memory."""
    return tensor.device.type == "cpu" and all(
        hasattr(part.untyped_storage(), _MARK) for part in with_memory(tensor)
    )


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is pinned, otherwise a pinned copy, like `Tensor.pin_memory`."""
    if is_pinned(tensor):
        return tensor
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_no_values(tensor):
        return pin(zeros_on_host(tensor.shape, tensor.stride(), tensor.dtype))
    return pin(tensor.detach().clone())


def zeros_on_host(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the host. The operating system provides memory for a large one as it is written."""
    nbytes = (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * dtype.itemsize
    if 0 in shape or nbytes < LARGE_ON_HOST:
        return torch.empty_strided(shape, stride, dtype=dtype).zero_()
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)


def has_no_values(host: torch.Tensor) -> bool:
    """Return whether nothing can depend on the values of a large host tensor: no script reads them, or they
    came from the device. Such a tensor is not copied and not computed with, so it takes no real memory."""
    if host.device.type != "cpu" or host.nbytes < LARGE_ON_HOST or not host.is_floating_point():
        return False
    return not ACCELERATOR.follows_numbers or hasattr(host.untyped_storage(), "_sim_placeholders")


def with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a wrapper subclass, or any other tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from with_memory(part)
