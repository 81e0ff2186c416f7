"""Flat buffers whose storage is allocated and freed repeatedly, and how memory passes between streams.

A ``FlatBuffer`` is one 1-D tensor that lives as long as its unit; only its *storage* is freed and allocated
again (``untyped_storage().resize_``). Views into it, and so the parameters, are made once and stay valid.

Memory that another stream reads is freed after the reader is done, in one of two ways (``MemoryHandover``):

* ``RECORD_STREAM``: the allocator keeps the block until it *polls* the reader's event, at a later allocation,
  and finds it done. The CPU runs ahead of that, so blocks pile up. This is why there is a rate limiter.
* ``EVENTS``: the owner's stream waits for the reader's event, so the CPU can reuse the block immediately.
  If the wait would cost overlap, the buffer is *held* for one more unit.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..collectives.comm import Comm
from ..shared.settings import MemoryHandover
from .streams import Event, Stream


class FlatBuffer:
    """A 1-D tensor whose storage ``take`` allocates and ``free`` frees. A new buffer has its storage.

    Args:
        numel: elements, including padding.
        owner: the stream that allocates; the block belongs to its memory pool.
    """

    __slots__ = ("nbytes", "owner", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, owner: Stream) -> None:
        self.owner = owner
        self.nbytes = numel * dtype.itemsize
        # The first forward may run in inference mode, but later training needs a normal tensor.
        with owner, torch.inference_mode(False):
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    def take(self) -> None:
        """Allocate the storage; the caller must be on the owner's stream.

        Raises the allocator's out-of-memory error.
        """
        storage = self.tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Return the storage to the owner's pool."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != 0:
            storage.resize_(0)


class CommBuffer(FlatBuffer):
    """A buffer that ``source.allocate`` allocates: a new tensor each time it is taken."""

    __slots__ = ("_request", "_source")

    def __init__(
        self, source: Comm, numel: int, dtype: torch.dtype, device: torch.device, owner: Stream
    ) -> None:
        self.owner = owner
        self.nbytes = numel * dtype.itemsize
        self._source = source
        self._request = (numel, dtype, device)
        with owner:
            self.tensor = self._allocate()

    def _allocate(self) -> torch.Tensor:
        numel, dtype, device = self._request
        return self._source.allocate((numel,), dtype=dtype, device=device)

    def take(self) -> None:
        """Allocate; the caller must be on the owner's stream."""
        if self.tensor.numel() != self._request[0]:
            self.tensor = self._allocate()

    def free(self) -> None:
        """Drop the memory."""
        self.tensor = self.tensor.new_empty(0)


def make_buffer(
    numel: int, dtype: torch.dtype, device: torch.device, owner: Stream, custom: Comm | None
) -> FlatBuffer:
    """Return a buffer of ``numel`` elements to communicate from or into, with its storage allocated."""
    if custom is None:
        return FlatBuffer(numel, dtype, device, owner)
    return CommBuffer(custom, numel, dtype, device, owner)


class Handover:
    """Frees buffers that ``reader`` streams used, in one of the two ways above.

    Args:
        has_streams: whether readers may still be running; otherwise buffers are freed immediately.
    """

    def __init__(self, mode: MemoryHandover, has_streams: bool = True) -> None:
        self.mode = mode
        self._immediate = not has_streams
        self.held: deque[tuple[FlatBuffer, Event | None]] = deque()

    def release(self, buffer: FlatBuffer, reader: Stream, hold: int = 0) -> None:
        """Free ``buffer`` after the work queued on ``reader`` up to now.

        Args:
            hold: with ``EVENTS``, how many released buffers may stay allocated so that their owner need not
                wait yet.
        """
        if self._immediate:
            buffer.free()
        elif self.mode is MemoryHandover.RECORD_STREAM:
            reader.keep(buffer.tensor)
            buffer.free()
        else:
            self.held.append((buffer, reader.record()))
            self.trim(hold)

    def trim(self, hold: int = 0) -> None:
        """Free held buffers, oldest first, until ``hold`` are left."""
        while len(self.held) > hold:
            buffer, event = self.held.popleft()
            # The owner may reuse this block next. It must write there only after the reader is done.
            buffer.owner.wait(event)
            buffer.free()

    def reclaim(self, buffer: FlatBuffer) -> None:
        """Finish the release of ``buffer``, if it is still held, before it is allocated again."""
        if any(held is buffer for held, _ in self.held):
            self.trim(0)


# -- on the CPU: keep freed memory in the process, as torch's caching allocator does on a GPU ----------------
# Gathered parameters and gradients are allocated and freed in megabytes. glibc returns the free end of its
# heap to the system once that exceeds twice the largest block that was ever mmapped and freed. The system
# then hands it out again page by page and zeroes each page at its first touch. Here malloc may keep as much
# as a step allocates and frees, so a process grows to its peak and stays there. Nothing changes with another
# malloc, or if the user sets the threshold (``MALLOC_TRIM_THRESHOLD_``).

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# In bytes, glibc's maximum. Larger blocks are mmapped separately and unmapped when freed.
_MOST_MMAP_THRESHOLD = 32 << 20
_MOST_KEPT = 1 << 30


def keep_freed_pages(nbytes: int) -> None:
    """Let malloc keep up to ``nbytes`` of freed memory in this process; the limit never decreases."""
    set_malloc = _mallopt()
    if set_malloc is not None and nbytes > _kept_pages[-1]:
        _kept_pages.append(nbytes)
        set_malloc(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        set_malloc(_M_TRIM_THRESHOLD, min(nbytes, _MOST_KEPT))


# glibc reaches twice the largest mmapped block by itself; a lower limit would have no effect.
_kept_pages = [2 * _MOST_MMAP_THRESHOLD - 1]


@lru_cache(maxsize=1)
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's ``mallopt``, or None without glibc or if the user set the thresholds."""
    decided = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if decided or "malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    libc = ctypes.CDLL(None)
    return libc.mallopt if hasattr(libc, "gnu_get_libc_version") else None


# CPU offload: shards, gradients and the optimizer step are on the host.
#
# ::
#
#     host     shard ------+                                            +--> gradient, optimizer step
#                          | copy-in stream                               | to-host stream
#     device               +--> this rank's part of the gather buffer   +-- reduced shard
#                                         [all-gather] ... [reduce-scatter]
#
# A shard is copied straight to its place in the gather buffer. If it is also cast, it passes through a
# staging buffer, so that the device casts it. Gradients are copied back on a separate stream: both directions
# of the link are used at the same time, and no reduce-scatter waits for a copy. A gradient is delivered to
# the optimizer's parameters when its copy is done: polled whenever another copy starts, waited for at the end
# of backward. So the CPU never blocks in the middle of backward, and accumulation and hooks (such as an
# optimizer in backward) run on complete gradients.
#
# A front end creates its unit with a ``HostOffload`` and its shard with ``new_shard``, and does not move the
# parameters to the device before. On a CPU device the same code runs, with copies inside host memory.


HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostOffload:
    """The CPU offload of a unit's shard, with or without pinned memory.

    Copies of pinned memory are asynchronous. Without it, copies to the device are slower, and copies to the
    host block the CPU.
    """

    pins: bool

    @classmethod
    def decide(cls, pin_memory: bool, device: torch.device) -> "HostOffload":
        """Return the offload for a unit that computes on ``device``; memory is not pinned for a CPU."""
        return cls(pin_memory and device.type != "cpu")


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, offload: "HostOffload | None"
) -> torch.Tensor:
    """Return a zeroed flat shard for parameters on ``device``; on the host if offloaded.

    A shard on the meta device stays there until it is materialised.
    """
    if offload is None or device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    shard = torch.zeros(numel, dtype=dtype, device=HOST)
    return shard.pin_memory() if offload.pins else shard


class ShardCopy:
    """Copies a unit's shard to the input of its all-gather: a cast, a copy from the host, or both.

    Args:
        numel: elements of the shard.
        device: the device of computation.
    """

    def __init__(
        self, numel: int, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, from_host: bool
    ) -> None:
        self._numel = numel
        self._stored, self._computed = dtypes
        self._device = device
        self._stages = from_host and self._stored != self._computed
        self._staged: FlatBuffer | None = None
        self._own: FlatBuffer | None = None

    def write(self, target: torch.Tensor, shard: torch.Tensor, stream: Stream) -> None:
        """Copy ``shard`` into ``target`` on ``stream``, which must be the current stream."""
        if not self._stages:
            target.copy_(shard, non_blocking=True)
            return
        if self._staged is None:
            self._staged = FlatBuffer(self._numel, self._stored, self._device, stream)
        self._staged.take()
        self._staged.tensor.copy_(shard, non_blocking=True)
        target.copy_(self._staged.tensor)
        self._staged.free()  # the copy's stream owns it, so the next user of the block runs after the copy

    def take(self, stream: Stream) -> FlatBuffer:
        """Return a separate buffer for the result; ``stream`` must be the current stream."""
        if self._own is None:
            self._own = FlatBuffer(self._numel, self._computed, self._device, stream)
        self._own.take()
        return self._own

    def free(self) -> None:
        """Free the buffer of ``take``, if there is one."""
        if self._own is not None:
            self._own.free()
