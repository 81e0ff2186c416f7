"""Modules of DHEN (`dhen_workload.py`), and its sparse tables.

    ids ---> sparse tables (not under FSDP) --> mix to tokens -+
                                                               +-> blocks.0 ... blocks.N-1 -> head -> logit
    numbers -> two-layer perceptron -> one token --------------+

    block:  norm(x + attention(x) + mixture of tokens(x) + x * (W flat(x) + b))        flat: tokens x width

A block is an ensemble of different interactions, which are summed, with a shortcut: self-attention, a linear
mixture of tokens, and a cross (deep and cross network v2, Wang et al. 2021), whose square matrix over all
tokens holds nearly all dense parameters.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.blocks import CheckpointedBlock
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.families.dhen_workload import DHENShape
from fsdpbench.workloads.layers import DTYPES, Projection

SPARSE_LEARNING_RATE = 0.02
_EPSILON = 1e-10


class TokenAttention(nn.Module):
    """Self-attention over the tokens of [batch, tokens, width]."""

    def __init__(self, shape: DHENShape, std: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = Projection(shape.width, 3 * shape.width, bias=True, std=shape.width**-0.5)
        self.output = Projection(shape.width, shape.width, bias=True, std=std * shape.width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected


class DHENBlock(CheckpointedBlock):
    """An ensemble of interactions with a shortcut: the natural FSDP unit."""

    def __init__(self, shape: DHENShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        std = 1 / math.sqrt(3 * shape.layers)
        self.attention = TokenAttention(shape, std)
        self.mixture = Projection(shape.tokens, shape.tokens, bias=True, std=std * shape.tokens**-0.5)
        self.cross = Projection(shape.flat, shape.flat, bias=True, std=std * shape.flat**-0.5)
        self.norm = nn.LayerNorm(shape.width)

    def transform(self, x: Tensor) -> Tensor:
        """Keep the shape [batch, tokens, width]."""
        mixture = self.mixture(x.transpose(1, 2)).transpose(1, 2)
        cross = x * self.cross(x.flatten(1)).view_as(x)
        normed: Tensor = self.norm(x + self.attention(x) + mixture + cross)
        return normed


class DHEN(nn.Module):
    """The model: `dhen(numbers, ids)` returns logits, `dhen(numbers, ids, labels)` their mean cross entropy.

    Numbers are floating-point [batch, numbers], ids int64 [batch, features], labels 0 or 1 [batch], logits
    [batch] in the parameters' dtype.
    """

    def __init__(self, shape: DHENShape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        width = shape.width
        self.sparse = SparseTables(shape.features, shape.rows, width, DTYPES[shape.table_dtype])
        self.feature_mix = Projection(shape.features, shape.tokens - 1, bias=False, std=shape.features**-0.5)
        self.numbers_in = Projection(shape.numbers, 4 * width, bias=True, std=shape.numbers**-0.5)
        self.numbers_out = Projection(4 * width, width, bias=True, std=(4 * width) ** -0.5)
        self.blocks = nn.ModuleList(DHENBlock(shape, checkpointing, index) for index in range(shape.layers))
        self.head_in = Projection(shape.flat, shape.hidden, bias=True, std=shape.flat**-0.5)
        self.head_out = Projection(shape.hidden, 1, bias=True, std=shape.hidden**-0.5)

    def forward(self, numbers: Tensor, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        dense = self.numbers_out(F.relu(self.numbers_in(numbers)))
        rows = self.sparse(ids).to(dense.dtype)
        tokens = self.feature_mix(rows.transpose(1, 2)).transpose(1, 2)
        x = torch.cat((dense.unsqueeze(1), tokens), dim=1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head_out(F.relu(self.head_in(x.flatten(1)))).squeeze(1)
        if labels is None:
            return logits
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float())


class SparseTables:
    """Embedding tables too large to replicate or gather: each rank holds some, and activations are exchanged.

            rank 0: tables 0, 2      rank 1: tables 1, 3       table k is on rank k mod ranks
                 |                        |
        ids ---- all-to-all ------------- all-to-all           each id goes to the rank that holds its table
                 | look up                | look up
        rows --- all-to-all ------------- all-to-all           rows return to the rank of the sample

    `features` tables of `rows` x `width` are distributed over the ranks of the default process group. A call
    takes ids, int64 [batch, features] below `rows`, with the same batch size on every rank, and returns their
    rows, [batch, features, width] in the tables' dtype.

    Backward sends the rows' gradients back the same way and takes an optimizer step immediately, like the
    fused optimizers of embedding libraries: gradients of whole tables never exist. The optimizer is row-wise
    Adagrad, with one number of state per row (the sum of mean squares of the row's gradients).

    The tables are not parameters of any module: FSDP, DDP, the optimizer and `state_dict` do not see them.
    The first forward creates them on the device of the ids, filled with zeros, so they are the same on any
    number of ranks, and rows that are looked up learn.
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
        """Return this rank's tables, concatenated: [own features x rows, width]; None before use."""
        return None if self._share is None else self._share.table


class _Share:
    """The tables of one rank, and the sizes for its sends and receives."""

    def __init__(self, tables: SparseTables, device: torch.device) -> None:
        alone = not dist.is_available() or not dist.is_initialized()
        ranks, rank = (1, 0) if alone else (dist.get_world_size(), dist.get_rank())
        self.width = tables.width
        self.world_size = ranks
        owned = [range(owner, tables.features, ranks) for owner in range(ranks)]
        self.sizes = [len(part) for part in owned]
        self.own = self.sizes[rank]
        self.table = torch.zeros(
            (self.own * tables.rows, tables.width), dtype=tables.dtype, device=device, requires_grad=False
        )
        self.squares = torch.zeros(self.own * tables.rows, device=device)
        # The first row of each table of this rank.
        self.offsets = (torch.arange(self.own, device=device) * tables.rows)[None, :, None]
        by_owner = [feature for part in owned for feature in part]
        place = {feature: index for index, feature in enumerate(by_owner)}
        self.by_owner = torch.tensor(by_owner, device=device)
        self.in_order = torch.tensor([place[feature] for feature in range(tables.features)], device=device)
        # Autograd calls backward only for functions with an input that requires a gradient.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    @torch.no_grad()
    def update(self, asked: Tensor, gradients: Tensor) -> None:
        """Take one step of row-wise Adagrad on the rows `asked` (possibly repeated), with a gradient each."""
        gradients = gradients.float()
        self.squares.index_add_(0, asked, gradients.square().mean(dim=1))
        steps = SPARSE_LEARNING_RATE * (self.squares.index_select(0, asked) + _EPSILON).rsqrt()
        self.table.index_add_(0, asked, (gradients * steps.unsqueeze(1)).to(self.table.dtype), alpha=-1)

    def to_owners(self, parts: Tensor) -> Tensor:
        """Send this rank's [features by owner, ...]; return [ranks, own features, ...] for all samples."""
        received = parts.new_empty((self.world_size * self.own, *parts.shape[1:]))
        _all_to_all(received, parts, [self.own] * self.world_size, self.sizes)
        return received.unflatten(0, (self.world_size, self.own))

    def from_owners(self, parts: Tensor) -> Tensor:
        """Send [ranks, own features, ...] back to the samples' ranks; return [features by owner, ...]."""
        received = parts.new_empty((sum(self.sizes), *parts.shape[2:]))
        _all_to_all(received, parts.flatten(0, 1), self.sizes, [self.own] * self.world_size)
        return received


class _Exchange(torch.autograd.Function):
    """Look-up in all ranks' tables; its backward updates the tables."""

    @staticmethod
    def forward(ctx: Any, share: _Share, anchor: Tensor, ids: Tensor) -> Tensor:
        """Return the rows for `ids` [samples, features] from all ranks' tables."""
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
        # Each rank's loss is a mean over its own samples; the global mean is their sum divided by the ranks.
        share.update(asked.flatten(), rows / share.world_size)
        return None, torch.zeros_like(share.anchor), None


def _all_to_all(
    received: Tensor, sent: Tensor, receive_sizes: Sequence[int], send_sizes: Sequence[int]
) -> None:
    if len(send_sizes) == 1:
        received.copy_(sent)
        return
    dist.all_to_all_single(received, sent.contiguous(), list(receive_sizes), list(send_sizes))
