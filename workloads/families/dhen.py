"""DHEN: a recommendation model of stacked interactions of feature embeddings (Zhang et al. 2022, 2203.11014).

    ids ---> sparse tables (not under FSDP) --> mix to tokens -+
                                                               +-> blocks.0 ... blocks.N-1 -> head -> logit
    numbers -> two-layer perceptron -> one token --------------+

    block:  norm(x + attention(x) + mixture of tokens(x) + x * (W flat(x) + b))        flat: tokens x width

A block is an ensemble of interactions of different kinds, summed, with a shortcut: self-attention, a linear
mixture of tokens, and a cross (deep and cross network v2, Wang et al. 2021), whose square matrix over all
tokens holds nearly all of the dense parameters. The sparse tables exchange activations: `sparse.py`.

FLOPs: 6 a sample for each weight of a product that works on whole samples, 6 for each token and weight of one
that works on tokens, 12 x tokens^2 x width for attention. The numbers' first layer needs no gradient of its
input. Look-ups are not FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.base import Batch, SampleWorkload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing, CheckpointedBlock
from fsdpbench.workloads.families.sparse import STATE_BYTES, SparseTables
from fsdpbench.workloads.flops import BlockFlops, ForwardFlops
from fsdpbench.workloads.inputs.clicks import click_batches
from fsdpbench.workloads.layers import Projection
from fsdpbench.workloads.shape import check_divides, check_positive, check_word
from fsdpbench.workloads.shaped import Shaped
from fsdpbench.workloads.tensor_plan import ShapeError

FAMILY = "dhen"
TABLE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DHENShape:
    """The shape of a DHEN.

    Fields: `tokens` that blocks work on, each `width` wide; `heads` of attention; `features`: categories of a
    sample, a sparse table of `rows` each; `numbers` of a sample; `hidden`: width of the head's hidden layer;
    `table_dtype`: of the sparse tables.

    Raises:
        ShapeError: a number is too small, heads do not divide the width, or `table_dtype` is unknown.
    """

    layers: int
    tokens: int
    width: int
    heads: int
    features: int = 26
    rows: int = 1000
    numbers: int = 13
    hidden: int = 512
    table_dtype: str = "fp32"

    def __post_init__(self) -> None:
        check_positive(self, "layers", "tokens", "width", "heads", "features", "rows", "numbers", "hidden")
        check_divides(self, "heads", "width")
        if self.tokens < 2:
            raise ShapeError("shape field tokens is 1: one is of the numbers, at least one of the features")
        check_word(self, "table_dtype", TABLE_DTYPES)

    @property
    def flat(self) -> int:
        """Width of all tokens together."""
        return self.tokens * self.width


# `dhen` has the FSDP paper's sizes, 768 B sparse and 550 M dense parameters, in a shape of our choice: the
# paper (arXiv 2304.11277) publishes none. Half-precision tables agree with the memory in its figure 8a.
SIZES: Mapping[str, DHENShape] = {
    "dhen-tiny": DHENShape(2, 8, 16, 2, hidden=32),
    "dhen": DHENShape(
        8, 64, 128, 4, features=1024, rows=5_859_375, numbers=1024, hidden=1472, table_dtype="bf16"
    ),
}


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
        """[batch, tokens, width] to the same."""
        mixture = self.mixture(x.transpose(1, 2)).transpose(1, 2)
        cross = x * self.cross(x.flatten(1)).view_as(x)
        normed: Tensor = self.norm(x + self.attention(x) + mixture + cross)
        return normed


class DHEN(nn.Module):
    """The model: `dhen(numbers, ids)` gives logits, `dhen(numbers, ids, labels)` their mean cross entropy.

    Numbers are floating point of shape [batch, numbers], ids int64 of [batch, features], labels 0 or 1 of
    [batch], logits [batch] in the parameters' dtype.
    """

    def __init__(self, shape: DHENShape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        width = shape.width
        self.sparse = SparseTables(shape.features, shape.rows, width, TABLE_DTYPES[shape.table_dtype])
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


class DHENWorkload(Shaped[DHENShape], SampleWorkload):
    """A DHEN of one shape, with clicks as data; `parameters` are the dense ones, which FSDP shards."""

    family = FAMILY
    shape_type = DHENShape

    @property
    def parameters(self) -> int:
        s, w = self._shape, self._shape.width
        attention = 4 * w * w + 4 * w
        block = attention + s.tokens * (s.tokens + 1) + s.flat * (s.flat + 1) + 2 * w
        numbers = 4 * w * (s.numbers + 1) + w * (4 * w + 1)
        head = s.hidden * (s.flat + 1) + s.hidden + 1
        return s.layers * block + s.features * (s.tokens - 1) + numbers + head

    @property
    def sparse_parameters(self) -> int:
        """Elements of all sparse tables, on all ranks together."""
        return self._shape.features * self._shape.rows * self._shape.width

    @property
    def training_state_bytes(self) -> int:
        s = self._shape
        row_bytes = TABLE_DTYPES[s.table_dtype].itemsize * s.width + STATE_BYTES
        return super().training_state_bytes + row_bytes * s.features * s.rows

    @property
    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return (DHENBlock,)

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> nn.Module:
        self.resolve_seq(seq)
        return DHEN(self._shape, ActivationCheckpointing.parse(activation_checkpointing))

    def batches(
        self,
        batch: int,
        seq: int | None,
        seed: int,
        rank: int,
        device: torch.device | str,
        data: Path | None = None,
        *,
        world_size: int | None = None,
    ) -> Iterator[Batch]:
        self.resolve_seq(seq)
        return click_batches(
            numbers=self._shape.numbers,
            features=self._shape.features,
            rows=self._shape.rows,
            batch=batch,
            seed=seed,
            rank=rank,
            device=device,
            data=data,
            world_size=world_size,
        )

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        """2 a weight and position, attention in full. The numbers' first layer needs no input gradient."""
        self.resolve_seq(seq)
        s, w = self._shape, self._shape.width
        numbers_in = 2 * s.numbers * 4 * w
        ends = 2 * (s.features * (s.tokens - 1) * w + 4 * w * w + s.hidden * (s.flat + 1))
        products = (s.tokens**2 * w, s.flat**2, s.tokens * 3 * w * w, s.tokens * w * w)
        block = BlockFlops(
            tuple(2 * batch * product for product in products),
            attention=4 * batch * s.tokens**2 * w,
            ends_needed=True,
        )
        rest = batch * (ends + numbers_in)
        return ForwardFlops([[block] * s.layers], rest, first=batch * numbers_in)
