"""Flat storage that is taken and given back, and how it passes between streams.

A ``FlatBuffer`` is one 1-D tensor that lives as long as its unit; only its *storage* comes and goes
(``untyped_storage().resize_``). Views into it, and so the parameters, are made once and stay valid.

Memory of one stream that another stream reads is given back when the reader is done (``MemoryHandover``):

* ``RECORD_STREAM``: the allocator keeps the block until it *sees*, at some later allocation, that the reader
  is done. The CPU runs ahead of that, so blocks pile up: the rate limiter is there for this reason.
* ``EVENTS``: the owner's stream waits for the reader's event, and the block is free immediately for the CPU.
  Where the wait would cost overlap the buffer is *held* for one more turn.
"""

from __future__ import annotations

from collections import deque

import torch

from ..collectives.custom_comm import Comm
from ..shared.settings import MemoryHandover
from .streams import Stream


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

    @property
    def taken(self) -> bool:
        """Whether there is memory behind the buffer now."""
        return self.nbytes == 0 or self.tensor.untyped_storage().size() > 0

    def take(self) -> None:
        """Allocate the storage; the caller must be on the owner's stream.

        Raises the allocator's out-of-memory error.
        """
        storage = self.tensor.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the storage back to the owner's pool."""
        storage = self.tensor.untyped_storage()
        if storage.size() != 0:
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

    @property
    def taken(self) -> bool:
        """Whether there is memory behind the buffer now."""
        return self.tensor.numel() == self._request[0]

    def take(self) -> None:
        """Allocate; the caller must be on the owner's stream."""
        if not self.taken:
            self.tensor = self._allocate()

    def free(self) -> None:
        """Drop the memory."""
        self.tensor = self.tensor.new_empty(0)


def make_buffer(
    numel: int, dtype: torch.dtype, device: torch.device, owner: Stream, custom: Comm | None
) -> FlatBuffer:
    """A buffer to communicate from or into, taken."""
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
        self._held: deque[tuple[FlatBuffer, Stream, object]] = deque()

    def release(self, buffer: FlatBuffer, reader: Stream, hold: int = 0) -> None:
        """Give ``buffer`` back once ``reader`` has done what it was given so far.

        Args:
            hold: with ``EVENTS``, how many released buffers may stay allocated so that their owner need not
                wait yet.
        """
        if self._immediate:
            buffer.free()
            return
        if self.mode is MemoryHandover.RECORD_STREAM:
            reader.keep(buffer.tensor)
            buffer.free()
            return
        self._held.append((buffer, reader, reader.record()))
        self.trim(hold)

    def trim(self, hold: int = 0) -> None:
        """Give back held buffers, oldest first, until ``hold`` are left."""
        while len(self._held) > hold:
            buffer, _, event = self._held.popleft()
            buffer.owner.wait(event)  # type: ignore[arg-type]
            buffer.free()

    def reclaim(self, buffer: FlatBuffer) -> None:
        """Before ``buffer`` is taken again: finish its own release if it is still held."""
        if self._held and any(held is buffer for held, _, _ in self._held):
            self.trim(0)
