"""Modules of Llama 2 and 3 (`llama_workload.py`).

    tokens -> token embedding -> blocks.0 ... blocks.N-1 -> norm -> lm head -> logits
                                  |
       x + output(attention(rotate(query, key), value))  then  x + down(silu(gate) * up)

Rotary positions rotate each pair of a query's or key's elements by an angle proportional to the token's
position. Each forward computes sines and cosines once and passes them to all blocks. Without buffers, the
model needs only `reset_parameters` after a build on `meta`.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads import rotations
from fsdpbench.workloads.blocks import CheckpointedBlock
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.decoder.experts import DecoderFeedForward
from fsdpbench.workloads.families.llama_workload import LlamaShape
from fsdpbench.workloads.layers import WEIGHT_STD, DecoderNorm, Lookup, Projection
from fsdpbench.workloads.losses import ComputesTokenLoss

_NORM_EPS = 1e-5


def make_norm(shape: LlamaShape) -> nn.Module:
    """Return an RMSNorm over d_model, fused or composed according to the shape."""
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
    """Attention and feed-forward with residual connections: the natural FSDP unit."""

    def __init__(self, shape: LlamaShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        output_std = WEIGHT_STD / math.sqrt(2 * shape.layers)
        self.attention_norm = make_norm(shape)
        self.attention = LlamaAttention(shape, output_std)
        self.feed_forward_norm = make_norm(shape)
        self.feed_forward = DecoderFeedForward(shape.decoder, output_std)

    def transform(self, x: Tensor, *tables: Tensor) -> Tensor:
        """Keep the shape [batch, seq, d_model]; `tables` hold the rotary angles."""
        x = x + self.attention(self.attention_norm(x), *tables)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(ComputesTokenLoss, nn.Module):
    """The model: `llama(inputs)` returns logits, `llama(inputs, targets)` the mean cross entropy.

    Inputs and targets are int64 [batch, seq], logits [batch, seq, vocab] in the parameters' dtype.
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
