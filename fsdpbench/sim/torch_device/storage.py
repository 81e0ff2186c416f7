"""Storages without data, whose sizes and lives are real.

A tensor of the device has a storage of zero bytes as far as torch's C++ knows. Its true size is kept in a
`StorageRecord`: a weak reference to the storage's Python object, which torch keeps alive as long as the C++
storage lives. It is called back when the storage really dies (tensors that autograd has saved, and views,
included), and frees the simulated block then.

FSDP frees and takes its buffers by `storage.resize_`; a patch routes that and the storage's sizes here.
"""

from __future__ import annotations

import weakref
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from fsdpbench.sim.model.allocator import Block, CachingAllocator, SimOutOfMemoryError
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

_RECORD = "_sim_record"


class Known(NamedTuple):
    """The value of all elements, as a tensor of the host with one of them (`known_values.py`)."""

    value: torch.Tensor
    assumed: bool


class Chosen(NamedTuple):
    """Each element is one of so many numbers from 0, as a router chose (`choices.py`)."""

    among: int


class Share(NamedTuple):
    """So many of all elements are not zero; and whether these are ones."""

    of_all: Fraction
    ones: bool


class Numbered(NamedTuple):
    """The elements are 0, 1, 2 and so on, so many."""

    many: int


Choice = Chosen | Share | Numbered


class StorageRecord(weakref.ref):
    """Size in bytes and block of one storage (None while it is empty), and what is known of its values."""

    __slots__ = ("allocator", "block", "choice", "known", "nbytes", "symmetric")
    nbytes: int
    block: Block | Lent | None
    allocator: CachingAllocator | Lent
    known: Known | None
    choice: Choice | None
    symmetric: bool


class Lent:
    """Memory that belongs to another storage, block and allocator in one: what DLPack hands over. The lender
    lives as long as the storage that borrows."""

    def __init__(self, lender: torch.UntypedStorage, offset: int) -> None:
        self.lender: torch.UntypedStorage | None = lender
        self.offset = offset

    @property
    def address(self) -> int:
        start = None if self.lender is None else address(self.lender)
        return start + self.offset if start else 0

    def free(self, block: Any) -> None:
        """The borrower has died."""
        self.lender = None

    def record_stream(self, block: Any, stream: int) -> None:
        """Do not reuse the lender's memory before that stream has come here."""
        record: Any = None if self.lender is None else record_of(self.lender)
        if record is not None and record.block is not None:
            record.allocator.record_stream(record.block, stream)


def _free(record: StorageRecord) -> None:
    """The storage has died."""
    if record.block is not None:
        record.allocator.free(record.block)  # type: ignore[arg-type]
        record.block = None
    forget(record)


def forget(record: StorageRecord | None) -> None:
    """A storage has died, or is written with unknown values."""
    if record is not None and (record.known is not None or record.choice is not None):
        record.known = record.choice = None
        ACCELERATOR.known_values -= 1


def attach(storage: torch.UntypedStorage, nbytes: int) -> StorageRecord:
    """Give a new storage its size and its memory. Raises torch.OutOfMemoryError."""
    record = StorageRecord(storage, _free)
    record.known = record.choice = None
    record.symmetric = False
    record.nbytes = nbytes
    record.allocator = ACCELERATOR.allocator
    record.block = allocate(nbytes) if nbytes else None
    storage._sim_record = record  # type: ignore[attr-defined]
    if ACCELERATOR.holders is not None:
        ACCELERATOR.holders[id(record.block)] = record
    return record


def borrow(storage: torch.UntypedStorage, lender: torch.UntypedStorage, offset: int, nbytes: int) -> None:
    """Give a new storage `nbytes` of the lender's memory, from `offset` on."""
    record = StorageRecord(storage, _free)
    record.known = record.choice = None
    record.symmetric = False
    record.nbytes = nbytes
    record.block = record.allocator = Lent(lender, offset)
    storage._sim_record = record  # type: ignore[attr-defined]


def record_of(storage: torch.UntypedStorage) -> StorageRecord | None:
    """The record of a storage of the device; None for any other storage."""
    return getattr(storage, _RECORD, None)


def resize(record: StorageRecord, nbytes: int) -> None:
    """Free the storage's memory and take new memory of another size (contents do not exist)."""
    if nbytes == record.nbytes:
        return
    if isinstance(record.block, Lent):
        raise RuntimeError("Trying to resize storage that is not resizable: its memory came by DLPack")
    block = allocate(nbytes) if nbytes else None
    if record.block is not None:
        record.allocator.free(record.block)
    forget(record)
    record.block = block
    record.nbytes = nbytes
    record.allocator = ACCELERATOR.allocator
    if ACCELERATOR.holders is not None:
        ACCELERATOR.holders[id(block)] = record


def allocate(nbytes: int) -> Block:
    """Take memory on the current stream, or from the pool of the graph that is being captured. Raises
    torch.OutOfMemoryError with torch's own message."""
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
    """Simulated address of a storage, 0 while it is empty; None for a storage of another device."""
    record = record_of(storage)
    if record is None:
        return None
    return 0 if record.block is None else record.block.address


def use_on_stream(tensor: torch.Tensor, stream: int) -> None:
    """What `Tensor.record_stream` says: do not reuse this memory before that stream has come here."""
    record: Any = record_of(tensor.untyped_storage())
    if record is not None and record.block is not None:
        record.allocator.record_stream(record.block, stream)
