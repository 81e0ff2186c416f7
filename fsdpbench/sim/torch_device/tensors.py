"""Tensors of the device, views of them, their storages, and their twins on the meta device.

They are plain `torch.Tensor` objects (no subclass, no mode), indistinguishable from an accelerator's.

A storage has zero bytes in torch's C++. Its true size is in a `StorageRecord` and a weak reference to the
storage's Python object, which torch keeps alive as long as the C++ storage lives; its callback frees the
simulated block when the storage really dies (also if autograd or views held it). FSDP frees and allocates
buffers by `storage.resize_`, which a patch routes here.
"""

import functools
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
# The meta device's kernels change only geometry, and accept any tensor: views share the storage of their
# base. With only its key active `as_strided` goes there (cheaper than a call by key; the guard that includes
# a key would keep the key's device afterwards since torch 2.11). Most views need no operator at all.
_Key: Any = DispatchKey
_Keys = DispatchKeySet
_ABOVE = (_Key.ADInplaceOrView, _Key.AutogradPrivateUse1, _Key.AutogradMeta, _Key.AutocastPrivateUse1)
_ONLY_META = (_Keys(_META), functools.reduce(operator.or_, map(_Keys, _ABOVE)))
_force_keys = ForceDispatchKeyGuard
_as_strided = torch.as_strided
_reinterpret = reinterpret_tensor
_inference_mode = torch.is_inference_mode_enabled
# torch's own getter: where a user's script runs, `device.type` reads "cuda" (`fsdpbench/script`).
_type_of: Any = torch.device.type.__get__  # type: ignore[attr-defined]
_set_storage = set_storage_by_key


def new_tensor(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, nbytes: int
) -> torch.Tensor:
    """Return a tensor with its own memory; `strides` None: contiguous. Raises `torch.OutOfMemoryError`."""
    tensor = _create(shape, dtype)
    attach(tensor.untyped_storage(), nbytes)
    return tensor if strides is None else _reinterpret(tensor, shape, strides, 0)


def new_view(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor on the storage of `base`; `offset` and strides in elements of `dtype`."""
    if dtype is base.dtype:
        # New tensors belong to the inference mode, views to their base: `as_strided` heeds that.
        if not (base.is_inference() or _inference_mode()):
            return _reinterpret(base, shape, strides, offset - base.storage_offset())
        with _force_keys(*_ONLY_META):
            return _as_strided(base, shape, strides, offset)
    return _set_storage(_META, _create((0,), dtype), base.untyped_storage(), offset, shape, strides)


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of `tensor` with a storage of its own, as after DLPack."""
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
    """Point an existing tensor at a storage, with another geometry."""
    return _set_storage(_META, tensor, storage, offset, shape, strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides, as torch computes them (a dimension of size 0 counts as 1)."""
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
    """Return the elements of the storage between a tensor's first and last element, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def meta_twin(value: Any) -> Any:
    """Return the argument for the meta device: tensors, lists of tensors and devices are replaced."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.dim() == 0:
            return value  # operators take wrapped numbers and CPU scalars beside tensors of any device
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
    """Return all tensors of a call, in order, those in lists included."""
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
    """The origin of a value: known, a guess (a balanced count), an answer that only data has (`x > 0`)."""

    NO = 0
    GUESS = 1
    ANSWER = 2


class Known(NamedTuple):
    """Value of all elements, as a one-element tensor of the host (`known_values.py`)."""

    value: torch.Tensor
    assumed: Assumed


class Chosen(NamedTuple):
    """Each element is one of so many numbers from 0, as a router chose (`choices.py`)."""

    among: int


class Share(NamedTuple):
    """Number of non-zero elements; and whether these are ones."""

    of_all: Fraction
    ones: bool


class Listed(NamedTuple):
    """Whole numbers in a row, from the host (labels, a mask); `assumed`: other ranks are to hold them too."""

    values: torch.Tensor
    assumed: Assumed = Assumed.NO


Choice = Chosen | Share | Listed


class StorageRecord(weakref.ref):
    """Size in bytes and block of one storage (None while it is empty), and its known values."""

    __slots__ = ("allocator", "block", "choice", "known", "nbytes", "symmetric")
    nbytes: int
    block: "Block | Lent | None"
    allocator: "CachingAllocator | Lent"
    known: Known | None
    choice: Choice | None
    symmetric: bool


class Lent:
    """Memory of another storage, block and allocator in one, as DLPack passes it.

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
        """Release the lender: the borrower has died."""
        self.lender = None

    def record_stream(self, block: Any, stream: int) -> None:
        """Keep the lender's memory until that stream has come here."""
        record: Any = None if self.lender is None else record_of(self.lender)
        if record is not None and record.block is not None:
            record.allocator.record_stream(record.block, stream)


def _free(record: StorageRecord) -> None:
    """Free a dead storage's block."""
    python = ACCELERATOR.python
    # What dies with a lender may call the program's Python.
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
    """Set what is known of a storage, instead of what was."""
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
    """Give a new storage `nbytes` of the lender's memory, from `offset` on."""
    record = attach(storage, 0)
    record.nbytes = nbytes
    record.block = record.allocator = Lent(lender, offset)


def record_of(storage: torch.UntypedStorage) -> StorageRecord | None:
    """Return the record of a storage of the device; None for any other storage."""
    return getattr(storage, _RECORD, None)


def resize(record: StorageRecord, nbytes: int) -> None:
    """Free the storage's memory and allocate another size (contents do not exist)."""
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
    # A hook of autograd must not raise (the process would end), so that the result is written before.
    if ACCELERATOR.on_out_of_memory is not None:
        ACCELERATOR.on_out_of_memory(message)
    raise torch.OutOfMemoryError(message)


def address(storage: torch.UntypedStorage) -> int | None:
    """Return the simulated address of a storage, 0 while it is empty; None for one of another device."""
    record = record_of(storage)
    if record is None:
        return None
    return 0 if record.block is None else record.block.address


def use_on_stream(tensor: torch.Tensor, stream: int) -> None:
    """Run `Tensor.record_stream`: keep this memory until that stream has come here."""
    record: Any = record_of(tensor.untyped_storage())
    if record is not None and record.block is not None:
        record.allocator.record_stream(record.block, stream)


# Pinned memory is marked on the storage of the host's tensor, which torch's CPU allocator made: copies of it
# are asynchronous to the CPU, all others block it.
_MARK = "_sim_pinned"


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a host tensor's memory as pinned; return the tensor. Raises `torch.OutOfMemoryError`."""
    for part in with_memory(tensor):
        storage: Any = part.untyped_storage()
        if not hasattr(storage, _MARK):
            _take_pinned(storage)
        storage._sim_pinned = True
    return tensor


def _take_pinned(storage: Any) -> None:
    held, most = ACCELERATOR.pinned, ACCELERATOR.most_pinned
    held.hand_out(nbytes := 1 << max(0, storage.nbytes() - 1).bit_length())  # as torch rounds it
    weakref.finalize(storage, held.take_back, nbytes)
    if held.active_bytes > most:
        raise torch.OutOfMemoryError(error_text("tensors.pinned", held.active_bytes / 1e9, most / 1e9))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a host tensor is in pinned memory."""
    return tensor.device.type == "cpu" and all(
        hasattr(part.untyped_storage(), _MARK) for part in with_memory(tensor)
    )


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is pinned, else a pinned copy, as `Tensor.pin_memory`."""
    return tensor if is_pinned(tensor) else pin(tensor.detach().clone())


def with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the tensors inside one that wraps others; any other tensor as it is."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from with_memory(part)
