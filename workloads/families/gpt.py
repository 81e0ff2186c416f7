"""Modules of GPT (`gpt_workload.py`).

tokens -> token embedding (+ position embedding) -> blocks.0 ... blocks.N-1 -> norm -> lm head -> logits
                                                     |
             x + proj(attention(qkv(norm(x))))  then  x + down(gelu(up(norm(x))))
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.blocks import CheckpointedBlock
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.families.gpt_workload import GPTShape
from fsdpbench.workloads.layers import WEIGHT_STD, Lookup, Projection
from fsdpbench.workloads.losses import ComputesTokenLoss, token_loss
from fsdpbench.workloads.rotations import positions
from fsdpbench.workloads.shape import WorkloadError, error_text


class GPTAttention(nn.Module):
    """Causal self-attention of [batch, seq, d_model], with one projection for queries, keys and values."""

    def __init__(self, shape: GPTShape, output_std: float) -> None:
        super().__init__()
        self.mask: Tensor
        self.head_width = shape.d_model // shape.heads
        self.qkv = Projection(shape.d_model, 3 * shape.d_model, shape.bias)
        self.proj = Projection(shape.d_model, shape.d_model, shape.bias, output_std)
        self.dropout = shape.dropout
        self.explicit = shape.attention == "explicit"
        if self.explicit:
            # minGPT keeps a numeric mask in every block: 4 seq^2 bytes each, on every rank.
            mask = torch.empty(shape.max_seq, shape.max_seq)
            self.register_buffer("mask", mask, persistent=False)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the mask with 1 for visible tokens."""
        if self.explicit:
            self.mask.fill_(1.0).tril_()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention of [batch, heads, seq, head size] tensors."""
        if self.explicit:
            return self._explicit(query, key, value)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)

    def _explicit(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seq = query.shape[-2]
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(self.mask[:seq, :seq] == 0, -math.inf).softmax(-1)
        return F.dropout(weights, self.dropout, self.training) @ value

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # This rank's number of heads: all, or a subset with tensor parallelism.
        fused = self.qkv(x).view(batch, seq, 3, -1, self.head_width)
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(2))
        mixed = self.attend(query, key, value)
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return F.dropout(projected, self.dropout, self.training)


class GPTFeedForward(nn.Module):
    """Two-layer perceptron of a block on [batch, seq, d_model]."""

    def __init__(self, shape: GPTShape, output_std: float) -> None:
        super().__init__()
        self.up = Projection(shape.d_model, shape.expansion * shape.d_model, shape.bias)
        self.down = Projection(shape.expansion * shape.d_model, shape.d_model, shape.bias, output_std)
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.gelu(self.up(x)))
        return F.dropout(projected, self.dropout, self.training)


class GPTBlock(CheckpointedBlock):
    """Attention and feed-forward with residual connections: the natural FSDP unit."""

    def __init__(self, shape: GPTShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        self.random = shape.dropout > 0
        # GPT-2 scales outputs into the residual stream by the number of contributions.
        output_std = WEIGHT_STD / math.sqrt(2 * shape.layers)
        self.attention_norm = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.attention = GPTAttention(shape, output_std)
        self.feed_forward_norm = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.feed_forward = GPTFeedForward(shape, output_std)

    def transform(self, x: Tensor) -> Tensor:
        """Keep the shape [batch, seq, d_model]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(ComputesTokenLoss, nn.Module):
    """The model: `gpt(inputs)` returns logits, `gpt(inputs, targets)` the mean cross entropy.

    Inputs and targets are int64 [batch, seq], logits [batch, seq, vocab] in the parameters' dtype.
    """

    def __init__(self, shape: GPTShape, positions: int, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.fp32_loss = shape.fp32_loss
        self.dropout = shape.dropout
        self.token_embedding = Lookup(shape.vocab, shape.d_model)
        self.position_embedding = Lookup(positions, shape.d_model) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(GPTBlock(shape, checkpointing, index) for index in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.lm_head = Projection(shape.d_model, shape.vocab, bias=False)
        if shape.tied:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or the loss with `targets`.

        Raises:
            WorkloadError: the sequence is longer than the learned positions.
        """
        x = self.token_embedding(inputs)
        if self.position_embedding is not None:
            seq, most = inputs.shape[1], self.position_embedding.num_embeddings
            if seq > most:
                raise WorkloadError(error_text("gpt.positions", seq, most, seq))
            x = x + self.position_embedding(positions(seq, inputs.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        # Software profiles may replace `token_loss` in this module (tests/sim/software/test_undone.py).
        return self.logits_or_loss(self.final_norm(x), targets, self.fp32_loss, plain=token_loss)
