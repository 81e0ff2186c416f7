"""Llama 2 and 3: a decoder-only transformer with RMSNorm, SwiGLU, grouped queries and rotary positions.

    tokens -> token embedding -> blocks.0 ... blocks.N-1 -> norm -> lm head -> logits
                                  |
       x + output(attention(rotate(query, key), value))  then  x + down(silu(gate) * up)

Touvron et al. 2023 (arXiv 2307.09288), Grattafiori et al. 2024 (arXiv 2407.21783). Rotary positions turn each
pair of a query's or key's elements by an angle that grows with the token's position. Their sines and cosines
are computed once a forward and given to all blocks: a model without buffers needs nothing but
`reset_parameters` after a build on `meta`.

FLOPs as for GPT: a token costs 6 for each weight of a matrix product and 12 x layers x d_model x seq for
attention, in full although it is causal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads import rotations
from fsdpbench.workloads.base import NextTokenWorkload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing, CheckpointedBlock
from fsdpbench.workloads.decoder.experts import DecoderFeedForward
from fsdpbench.workloads.decoder.model import DecoderWorkload
from fsdpbench.workloads.decoder.shape import DecoderShape
from fsdpbench.workloads.layers import WEIGHT_STD, DecoderNorm, Lookup, Projection
from fsdpbench.workloads.losses import ComputesTokenLoss
from fsdpbench.workloads.shape import ShapeError, check_divides, check_positive, check_word
from fsdpbench.workloads.tensor_plan import Product, TensorPlan

FAMILY = "llama"
NORMS = ("fused", "composed")
_NORM_EPS = 1e-5


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a Llama.

    Fields: `kv_heads`: heads of keys and values, each serves heads / kv_heads query heads; `d_ff`:
    feed-forward width; `rope_theta`: base of the rotary angles; `tied`: the lm head shares the token
    embedding; `max_seq`: default sequence length; `fp32_loss`: logits are cast to fp32 before the loss.

    How published code computed the same: `norms`: `fused`, torch's one kernel, or `composed` of operators in
    fp32; `rotary`: `halves` in the model's dtype, `complex` numbers in fp32 (Meta's code, TorchTitan's) or
    `matrices` of 2 x 2 in fp32 (foundation-model-stack's); `repeat_kv`: keys and values are copied for every
    query head before attention.

    Raises:
        ShapeError: a number is below 1, heads do not divide as they must, a head's width is odd, or a word is
            unknown.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    vocab: int = 32000
    rope_theta: int = 10000
    tied: bool = False
    max_seq: int = 4096
    fp32_loss: bool = True
    norms: str = "fused"
    rotary: str = "halves"
    repeat_kv: bool = False

    def __post_init__(self) -> None:
        check_word(self, "norms", NORMS)
        check_word(self, "rotary", rotations.ROTATIONS)
        check_positive(
            self, "layers", "d_model", "d_ff", "heads", "kv_heads", "vocab", "rope_theta", "max_seq"
        )
        check_divides(self, "heads", "d_model")
        check_divides(self, "kv_heads", "heads")
        if self.head_width % 2:
            raise ShapeError(
                f"shape field d_model is {self.d_model}: with {self.heads} heads each is {self.head_width} "
                "wide, and rotary positions take pairs: give an even width a head"
            )

    @property
    def head_width(self) -> int:
        return self.d_model // self.heads

    @property
    def decoder(self) -> DecoderShape:
        """Return the decoder with the same layers."""
        sizes = (self.layers, self.d_model, self.d_ff, self.heads, self.kv_heads, self.vocab)
        return DecoderShape(*sizes, tied=self.tied, max_seq=self.max_seq)


def make_norm(shape: LlamaShape) -> nn.Module:
    """Make an RMSNorm over d_model, fused or composed as the shape says."""
    if shape.norms == "composed":
        return DecoderNorm(shape.d_model, _NORM_EPS, offset=False, composed=True)
    return nn.RMSNorm(shape.d_model, eps=_NORM_EPS)


class LlamaAttention(nn.Module):
    """Causal self-attention of [batch, seq, d_model] with grouped queries and rotary positions."""

    def __init__(self, shape: LlamaShape, output_std: float) -> None:
        super().__init__()
        self.width = shape.head_width
        self.rotary = shape.rotary
        self.grouped = shape.kv_heads != shape.heads
        self.repeats = shape.heads // shape.kv_heads if shape.repeat_kv and self.grouped else 0
        kv_width = shape.kv_heads * shape.head_width
        self.query = Projection(shape.d_model, shape.d_model, False)
        self.key = Projection(shape.d_model, kv_width, False)
        self.value = Projection(shape.d_model, kv_width, False)
        self.output = Projection(shape.d_model, shape.d_model, False, output_std)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        query, key, value = (
            projected.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for projected in (self.query(x), self.key(x), self.value(x))
        )
        turn = rotations.ROTATIONS[self.rotary].turn
        query, key = turn(query, *tables), turn(key, *tables)
        if self.repeats:
            key, value = (x.repeat_interleave(self.repeats, 1) for x in (key, value))
        grouped = self.grouped and not self.repeats
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected


class LlamaBlock(CheckpointedBlock):
    """Attention and feed-forward with their residual connections: the natural FSDP unit."""

    def __init__(self, shape: LlamaShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        output_std = WEIGHT_STD / math.sqrt(2 * shape.layers)
        self.attention_norm = make_norm(shape)
        self.attention = LlamaAttention(shape, output_std)
        self.feed_forward_norm = make_norm(shape)
        self.feed_forward = DecoderFeedForward(shape.decoder, output_std)

    def transform(self, x: Tensor, *tables: Tensor) -> Tensor:
        """Compute [batch, seq, d_model] to the same; `tables` of the rotary angles."""
        x = x + self.attention(self.attention_norm(x), *tables)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(ComputesTokenLoss, nn.Module):
    """The model: `llama(inputs)` gives logits, `llama(inputs, targets)` the mean cross entropy.

    Inputs and targets are int64 of shape [batch, seq], logits [batch, seq, vocab] in the parameters' dtype.
    """

    def __init__(self, shape: LlamaShape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.fp32_loss = shape.fp32_loss
        self.shape = shape
        self.token_embedding = Lookup(shape.vocab, shape.d_model)
        self.blocks = nn.ModuleList(LlamaBlock(shape, checkpointing, index) for index in range(shape.layers))
        self.final_norm = make_norm(shape)
        self.lm_head = Projection(shape.d_model, shape.vocab, bias=False)
        if shape.tied:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token_embedding(inputs)
        shape = self.shape
        rotation = rotations.ROTATIONS[shape.rotary]
        tables = rotation.tables(inputs.shape[1], shape.head_width, shape.rope_theta, x)
        for block in self.blocks:
            x = block(x, *tables)
        return self.logits_or_loss(self.final_norm(x), targets, self.fp32_loss)


class LlamaWorkload(NextTokenWorkload[LlamaShape]):
    """A Llama of one shape, with tokens as data."""

    family = FAMILY
    shape_type = LlamaShape
    module_type = Llama
    block_classes = (LlamaBlock,)

    @cached_property
    def _decoder(self) -> DecoderWorkload:
        return DecoderWorkload(self.name, self.spec.decoder)

    @property
    def parameters(self) -> int:
        return self._decoder.parameters

    def products(self, layer: int) -> list[Product]:
        return self._decoder.products(layer)

    def tensor_plan(self) -> TensorPlan:
        return self._decoder.tensor_plan()
