"""CPU offload: shards, gradients and the optimizer step live on the host.

::

    host     shard ------+                                            +--> gradient, optimizer step
                         | copy-in stream                               | give-back stream
    device               +--> own part of the gather buffer           +-- reduced shard
                                        [all-gather] ... [reduce-scatter]

A shard goes straight to its place in the gather buffer, or through a staging buffer where it is cast on the
way, so that the CPU casts nothing. Gradients are copied back on a stream of their own: both directions of the
link work at the same time, and no reduce-scatter waits for a copy. A gradient is handed to the optimizer's
parameters when it has arrived: asked for whenever another one starts its way, waited for at the end of
backward. So the CPU never waits in the middle of backward, and what it does with gradients (sums of
accumulated ones, hooks such as an optimizer in backward) it does with values that are there.

What a front end does: make its unit with a ``HostOffload`` and its shard with ``new_shard``, and not move the
parameters to the device before. On a CPU device the same path runs, with copies inside the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .buffer import FlatBuffer
from .streams import Stream

HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostOffload:
    """That a unit's shard is on the host, and whether in pinned memory.

    Pinned memory is copied while the CPU continues; other memory is copied in slower, and holds the CPU on
    the way back.
    """

    pins: bool

    @classmethod
    def decide(cls, pin_memory: bool, device: torch.device) -> HostOffload:
        """For parameters computed with on ``device``; a CPU has nothing to pin memory for."""
        return cls(pin_memory and device.type != "cpu")


def new_shard(
    numel: int, dtype: torch.dtype, device: torch.device, offload: HostOffload | None
) -> torch.Tensor:
    """Zeros for a flat shard of parameters that are on ``device``; on the host if offloaded.

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
        else:
            self._staged.take()
        self._staged.tensor.copy_(shard, non_blocking=True)
        target.copy_(self._staged.tensor)
        self._staged.free()

    def take(self, stream: Stream) -> FlatBuffer:
        """A buffer for the result, where it is not written into the gather buffer; ``stream`` is entered."""
        if self._own is None:
            self._own = FlatBuffer(self._numel, self._computed, self._device, stream)
        else:
            self._own.take()
        return self._own

    def free(self) -> None:
        """Give the buffer of ``take`` back, if there is one."""
        if self._own is not None:
            self._own.free()
