"""Embedding tables too large to replicate or to gather: each rank keeps some, and activations travel.

        rank 0: tables 0, 2      rank 1: tables 1, 3       table k is rank k mod ranks's
             |                        |
    ids ---- all-to-all ------------- all-to-all           each id goes to the rank that has its table
             | look up                | look up
    rows --- all-to-all ------------- all-to-all           the rows come back to the rank of the sample

Backward sends the rows' gradients the same way back and takes an optimizer step immediately, as the fused
optimizers of embedding libraries do: no gradient of a whole table exists. The optimizer is row-wise Adagrad,
usual for such tables, with one number of state a row (mean squares of the row's gradients, summed).

The tables are not parameters of any module: FSDP, DDP and the optimizer do not see them, which is what "kept
out of FSDP" asks for, and neither does `state_dict`. They come to be at the first forward, on the device of
the ids, filled with zeros: so they are the same on any number of ranks, and rows that are asked for learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

LEARNING_RATE = 0.02
STATE_BYTES = 4
"""The optimizer's state, a row."""
_EPSILON = 1e-10


class SparseTables:
    """`features` tables of `rows` x `width`, spread over the ranks of the default process group.

    Called with ids, int64 of [batch, features] below `rows` and of the same batch on every rank; returns
    their rows, [batch, features, width] in the tables' dtype.
    """

    def __init__(self, features: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self.features = features
        self.rows = rows
        self.width = width
        self.dtype = dtype
        self._share: _Share | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        if self._share is None:
            self._share = _Share(self, ids.device)
        rows: Tensor = _Exchange.apply(self._share, self._share.anchor, ids)
        return rows

    @property
    def own(self) -> Tensor | None:
        """This rank's tables one below the other, [own features x rows, width]; None before the first use."""
        return None if self._share is None else self._share.table


class _Share:
    """One rank's tables, and the sizes in which it sends and receives."""

    def __init__(self, tables: SparseTables, device: torch.device) -> None:
        ranks, rank = _world()
        self.width = tables.width
        self.world_size = ranks
        owned = [range(owner, tables.features, ranks) for owner in range(ranks)]
        self.sizes = [len(part) for part in owned]
        self.own = self.sizes[rank]
        self.table = torch.zeros(
            (self.own * tables.rows, tables.width), dtype=tables.dtype, device=device, requires_grad=False
        )
        self.squares = torch.zeros(self.own * tables.rows, device=device)
        # Where each table's rows begin in this rank's.
        self.offsets = (torch.arange(self.own, device=device) * tables.rows)[None, :, None]
        by_owner = [feature for part in owned for feature in part]
        place = {feature: index for index, feature in enumerate(by_owner)}
        self.by_owner = torch.tensor(by_owner, device=device)
        self.in_order = torch.tensor([place[feature] for feature in range(tables.features)], device=device)
        # Autograd calls the backward of what has an input that needs a gradient.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    @torch.no_grad()
    def update(self, asked: Tensor, gradients: Tensor) -> None:
        """One step of row-wise Adagrad: `asked` rows (some perhaps twice), with a gradient each."""
        gradients = gradients.float()
        self.squares.index_add_(0, asked, gradients.square().mean(dim=1))
        steps = LEARNING_RATE * (self.squares.index_select(0, asked) + _EPSILON).rsqrt()
        self.table.index_add_(0, asked, (gradients * steps.unsqueeze(1)).to(self.table.dtype), alpha=-1)

    def to_owners(self, parts: Tensor) -> Tensor:
        """[features by owner, ...] of this rank's samples to [ranks, own features, ...] of all ranks'."""
        received = parts.new_empty((self.world_size * self.own, *parts.shape[1:]))
        _all_to_all(received, parts, [self.own] * self.world_size, self.sizes)
        return received.unflatten(0, (self.world_size, self.own))

    def from_owners(self, parts: Tensor) -> Tensor:
        """The way back."""
        received = parts.new_empty((sum(self.sizes), *parts.shape[2:]))
        _all_to_all(received, parts.flatten(0, 1), self.sizes, [self.own] * self.world_size)
        return received


class _Exchange(torch.autograd.Function):
    """Look up in all ranks' tables; backward updates them."""

    @staticmethod
    def forward(ctx: Any, share: _Share, anchor: Tensor, ids: Tensor) -> Tensor:
        asked = share.to_owners(ids.t().index_select(0, share.by_owner))
        asked = asked + share.offsets
        ctx.share = share
        ctx.save_for_backward(asked)
        rows = share.from_owners(F.embedding(asked, share.table))
        return rows.index_select(0, share.in_order).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        share: _Share = ctx.share
        (asked,) = ctx.saved_tensors
        by_owner = gradients[0].transpose(0, 1).index_select(0, share.by_owner)
        rows = share.to_owners(by_owner).flatten(0, 2)
        # Each rank's loss is a mean over its own samples: the mean over all is a share of their sum.
        share.update(asked.flatten(), rows / share.world_size)
        return None, torch.zeros_like(share.anchor), None


def _world() -> tuple[int, int]:
    """Number of ranks, and this one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def _all_to_all(
    received: Tensor, sent: Tensor, receive_sizes: Sequence[int], send_sizes: Sequence[int]
) -> None:
    if len(send_sizes) == 1:
        received.copy_(sent)
        return
    dist.all_to_all_single(received, sent.contiguous(), list(receive_sizes), list(send_sizes))
