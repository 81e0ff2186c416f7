"""Flat storage that is taken and given back, and how it passes between streams.

A ``FlatBuffer`` is one 1-D tensor that lives as long as its unit; only its *storage* comes and goes
(``untyped_storage().resize_``). Views into it, and so the parameters, are made once and stay valid.

Memory of one stream that another stream reads is given back when the reader is done (``MemoryHandover``):

* ``RECORD_STREAM``: the allocator keeps the block until it *sees*, at some later allocation, that the reader
  is done. The CPU runs ahead of that, so blocks pile up: the rate limiter is there for this reason.
* ``EVENTS``: the owner's stream waits for the reader's event, and the block is free immediately for the CPU.
  Where the wait would cost overlap the buffer is *held* for one more turn.
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
    """A 1-D tensor whose storage is taken (``take``) and given back (``free``). A new buffer is taken.

    Args:
        numel: elements, padding included.
        owner: the stream that allocates; only its pool sees the block.
    """

    __slots__ = ("nbytes", "owner", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, owner: Stream) -> None:
        self.owner = owner
        self.nbytes = numel * dtype.itemsize
        # A first forward may run in inference mode; training afterwards needs an ordinary tensor.
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
        """Give the storage back to the owner's pool."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != 0:
            storage.resize_(0)


class CommBuffer(FlatBuffer):
    """A buffer whose memory is ``source.allocate``'s, another one each time it is taken."""

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
    """Return a buffer of ``numel`` elements to communicate from or into, taken."""
    if custom is None:
        return FlatBuffer(numel, dtype, device, owner)
    return CommBuffer(custom, numel, dtype, device, owner)


class Handover:
    """Gives buffers back that ``reader`` streams used, in one of the two ways above.

    Args:
        has_streams: whether readers may still be at work; else memory is given back immediately.
    """

    def __init__(self, mode: MemoryHandover, has_streams: bool = True) -> None:
        self.mode = mode
        self._immediate = not has_streams
        self.held: deque[tuple[FlatBuffer, Event | None]] = deque()

    def release(self, buffer: FlatBuffer, reader: Stream, hold: int = 0) -> None:
        """Give ``buffer`` back once ``reader`` has done what it was given so far.

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
        """Give back held buffers, oldest first, until ``hold`` are left."""
        while len(self.held) > hold:
            buffer, event = self.held.popleft()
            # The owner allocates from this block next: it may write there only after the reader read it.
            buffer.owner.wait(event)
            buffer.free()

    def reclaim(self, buffer: FlatBuffer) -> None:
        """Finish the release of ``buffer``, if it is still held, before it is taken again."""
        if any(held is buffer for held, _ in self.held):
            self.trim(0)


# -- freed memory of a CPU stays with the process, as a GPU's stays with torch's allocator -------------------
# Gathered parameters and gradients come and go in megabytes. glibc returns what is free at the end of its
# heap to the system once that is twice the largest block that was ever mapped by itself and freed; the system
# hands it out again page by page, each cleared at its first touch. Here as much may stay as a step takes and
# gives back, so a process grows to its peak and stays there. Nothing changes where malloc is another one, or
# where the user decides (``MALLOC_TRIM_THRESHOLD_``).

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes; glibc takes no more. Larger blocks are mapped by themselves, and go back when freed.
_MOST_MMAP_THRESHOLD = 32 << 20
_MOST_KEPT = 1 << 30


def keep_freed_pages(nbytes: int) -> None:
    """Let malloc keep up to ``nbytes`` of freed memory, for the process; never less than before."""
    set_malloc = _mallopt()
    if set_malloc is not None and nbytes > _kept_pages[-1]:
        _kept_pages.append(nbytes)
        set_malloc(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        set_malloc(_M_TRIM_THRESHOLD, min(nbytes, _MOST_KEPT))


# glibc itself comes to twice the largest block; less would change nothing.
_kept_pages = [2 * _MOST_MMAP_THRESHOLD - 1]


@lru_cache(maxsize=1)
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's own function, if it is there and the user did not decide."""
    decided = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if decided or "malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    libc = ctypes.CDLL(None)
    return libc.mallopt if hasattr(libc, "gnu_get_libc_version") else None


# CPU offload: shards, gradients and the optimizer step live on the host.
#
# ::
#
#     host     shard ------+                                            +--> gradient, optimizer step
#                          | copy-in stream                               | give-back stream
#     device               +--> own part of the gather buffer           +-- reduced shard
#                                         [all-gather] ... [reduce-scatter]
#
# A shard goes straight to its place in the gather buffer, or through a staging buffer where it is cast on the
# way, so that the CPU casts nothing. Gradients are copied back on a stream of their own: both directions of
# the link work at the same time, and no reduce-scatter waits for a copy. A gradient is handed to the
# optimizer's parameters when it has arrived: asked for whenever another one starts its way, waited for at the
# end of backward. So the CPU never waits in the middle of backward, and what it does with gradients (sums of
# accumulated ones, hooks such as an optimizer in backward) it does with values that are there.
#
# What a front end does: make its unit with a ``HostOffload`` and its shard with ``new_shard``, and not move
# the parameters to the device before. On a CPU device the same path runs, with copies inside host memory.


HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostOffload:
    """That a unit's shard is on the host, and whether in pinned memory.

    Pinned memory is copied while the CPU continues; other memory is copied in slower, and holds the CPU on
    the way back.
    """

    pins: bool

    @classmethod
    def decide(cls, pin_memory: bool, device: torch.device) -> "HostOffload":
        """Return for parameters computed with on ``device``; a CPU has nothing to pin memory for."""
        return cls(pin_memory and device.type != "cpu")


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, offload: "HostOffload | None"
) -> torch.Tensor:
    """Return zeros for a flat shard of parameters that are on ``device``; on the host if offloaded.

    Those of the meta device stay there until they are materialised.
    """
    if offload is None or device.type == "meta":
        return torch.zeros(numel, dtype=dtype, device=device)
    shard = torch.zeros(numel, dtype=dtype, device=HOST)
    return shard.pin_memory() if offload.pins else shard


class ShardCopy:
    """Writes a unit's shard to where its all-gather wants it: a cast, a copy from the host, or both.

    Args:
        numel: elements of the shard.
        device: what is computed on.
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
        """Copy ``shard`` into ``target``, on ``stream``, which is entered."""
        if not self._stages:
            target.copy_(shard, non_blocking=True)
            return
        if self._staged is None:
            self._staged = FlatBuffer(self._numel, self._stored, self._device, stream)
        self._staged.take()
        self._staged.tensor.copy_(shard, non_blocking=True)
        target.copy_(self._staged.tensor)
        self._staged.free()  # its owner is the stream of the copy, so whoever gets the block comes after it

    def take(self, stream: Stream) -> FlatBuffer:
        """Return a buffer for the result, if not written into the gather buffer; ``stream`` is entered."""
        if self._own is None:
            self._own = FlatBuffer(self._numel, self._computed, self._device, stream)
        self._own.take()
        return self._own

    def free(self) -> None:
        """Give the buffer of ``take`` back, if there is one."""
        if self._own is not None:
            self._own.free()
