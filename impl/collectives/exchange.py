"""A reduce-scatter on gloo: what others own is sent to them, what is one's own is added where it is.

gloo's own reduce-scatter on one tensor all-reduces all of it and keeps a part. An exchange and a local sum
send half as much, and do not copy this rank's own part. On rank 1 of 3, with parameters a and b::

    gradients     a0 a1 a2   b0 b1 b2          a1: what rank 1 owns of a
    sent          a0 b0 | a2 b2                to rank 0 | to rank 2
    received      a1 b1 | a1 b1                of rank 0 | of rank 2
    result        their sum, and a1 b1 of this rank's own gradients added in place

The order of a sum is that of the ranks, the owner last, so it is equal on every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..shared.copy_in import copy_in
from ..shared.layout import UnitLayout
from ..shared.torch_internals import foreach_add_
from . import comm


class Exchange:
    """One reduction. The gradients are held until ``finish``, which reads this rank's part of them.

    Args:
        gradients: of the parameters, one rank's part after the other where the layout is chunked; of all of
            them where it is flat.
        offsets: start of each one's part in the result, where the layout is chunked.
        numel: elements of the result.
        before: divide by this before the sum.
    """

    def __init__(
        self,
        layout: UnitLayout,
        gradients: Sequence[torch.Tensor],
        offsets: Sequence[int],
        numel: int,
        dtype: torch.dtype,
        before: float,
    ) -> None:
        self._layout = layout
        self._numel = numel
        gradients = [g if type(g) is torch.Tensor else plain(g) for g in gradients]
        self.sent = torch.empty((layout.world_size - 1) * numel, dtype=dtype, device=gradients[0].device)
        self._own: list[tuple[int, torch.Tensor]] = []
        self._received = self.sent
        if layout.rank_major:
            self._cut_rows(gradients, offsets)
        else:
            self._cut_flat(gradients)
        self._own = [(offset, part.to(dtype)) for offset, part in self._own]
        if before != 1:
            self.sent.div_(before)
            self._own = [(offset, part / before) for offset, part in self._own]

    def start(self, group: ProcessGroup) -> dist.Work | None:
        """Send and receive, on the backend's own threads."""
        self._received = torch.empty_like(self.sent)
        return comm.exchange_shards(self._received, self.sent, group)

    def finish(self) -> torch.Tensor:
        """What all ranks' gradients of this rank's part sum up to, 1-D, once the exchange is done."""
        others = self._received.view(self._layout.world_size - 1, self._numel)
        result = others[0] if len(others) == 1 else others.sum(0)
        parts = [result[offset : offset + part.numel()].view(part.shape) for offset, part in self._own]
        if parts:  # a rank past the last chunk owns nothing
            foreach_add_(parts, [part for _, part in self._own])
        return result

    def _cut_rows(self, gradients: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        ranks, rank = self._layout.world_size, self._layout.rank
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        for gradient, offset in zip(gradients, offsets, strict=True):
            rows = -(-gradient.size(0) // ranks)
            begin = min(rank * rows, gradient.size(0))
            own = gradient[begin : begin + rows]
            if own.numel():
                self._own.append((offset, own))
            if gradient.size(0) < rows * ranks:  # each rank's part is padded to the largest
                pad = gradient.new_zeros(rows * ranks - gradient.size(0), *gradient.shape[1:])
                gradient = torch.cat((gradient, pad))
            before.append(gradient[: rank * rows])
            after.append(gradient[(rank + 1) * rows :])
        split = rank * self._numel
        for parts, sent in ((before, self.sent[:split]), (after, self.sent[split:])):
            if sent.numel():
                parts = [part for part in parts if part.numel()] if self._layout.has_empty else parts
                copy_in(parts, sent.view(-1, self._numel))

    def _cut_flat(self, gradients: Sequence[torch.Tensor]) -> None:
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        for segment, gradient in zip(self._layout.segments, gradients, strict=True):
            start, end = segment.shard_range
            flat = gradient.reshape(-1)
            before.append(flat[:start])
            after.append(flat[end:])
            if end > start:
                self._own.append((segment.shard_offset, flat[start:end]))
        parts = before + after
        used = sum(part.numel() for part in parts)
        torch.cat(parts, out=self.sent[:used])
        self.sent[used:].zero_()


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of a subclass as a plain tensor.

    A subclass may run an operation in place on a plain tensor and itself once for each tensor that it holds;
    a copy is the same however often it is made.
    """
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
