"""GPT: a decoder-only transformer in the manner of GPT-2 and GPT-3, pre-norm, GELU, fused QKV.

    tokens -> token embedding (+ position embedding) -> blocks.0 ... blocks.N-1 -> norm -> lm head -> logits
                                                         |
                 x + proj(attention(qkv(norm(x))))  then  x + down(gelu(up(norm(x))))

FLOPs follow PaLM (Chowdhery et al. 2022, appendix B): a token costs 6 for each weight of a matrix product and
12 x layers x d_model x seq for attention, counted in full although it is causal. The lm head is a matrix
product and counts, the embedding lookup is not one and does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.base import BlockFlops, NextTokenWorkload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing, CheckpointedBlock
from fsdpbench.workloads.layers import WEIGHT_STD, Lookup, Projection
from fsdpbench.workloads.losses import ComputesTokenLoss, token_loss
from fsdpbench.workloads.rotations import positions
from fsdpbench.workloads.shape import WorkloadError, check_divides, check_positive, check_share, check_word
from fsdpbench.workloads.tensor_plan import BlockPlan, Product, TensorPlan

FAMILY = "gpt"
POSITIONS = ("learned", "none")
ATTENTIONS = ("fused", "explicit")


@dataclass(frozen=True)
class GPTShape:
    """The shape of a GPT.

    Fields: `vocab` entries; `tied`: the lm head shares the token embedding; `bias`: of linear layers and
    norms (the lm head has none); `positions`: `learned` embeddings or `none`; `expansion`: feed-forward width
    / d_model; `max_seq`: default sequence length, and the learned positions at it; `fp32_loss`: logits are
    cast to fp32 before the loss, as most mixed precision training does (batch x seq x vocab x 4 B of
    memory); `attention`: `fused` (one kernel), or `explicit` as minGPT and models before flash attention
    write it, with the [seq, seq] weights in memory; `dropout`: of embeddings, attention, residuals.

    Raises:
        ShapeError: a number is out of range, heads do not divide d_model, or a word is unknown.
    """

    layers: int
    d_model: int
    heads: int
    vocab: int = 50304
    tied: bool = False
    bias: bool = True
    positions: str = "learned"
    expansion: int = 4
    max_seq: int = 2048
    fp32_loss: bool = True
    attention: str = "fused"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_share(self, "dropout")
        check_word(self, "attention", ATTENTIONS)
        check_positive(self, "layers", "d_model", "heads", "vocab", "expansion", "max_seq")
        check_divides(self, "heads", "d_model")
        check_word(self, "positions", POSITIONS)


class GPTAttention(nn.Module):
    """Causal self-attention of [batch, seq, d_model]; one fused projection to queries, keys and values."""

    def __init__(self, shape: GPTShape, output_std: float) -> None:
        super().__init__()
        self.mask: Tensor
        self.head_width = shape.d_model // shape.heads
        self.qkv = Projection(shape.d_model, 3 * shape.d_model, shape.bias)
        self.proj = Projection(shape.d_model, shape.d_model, shape.bias, output_std)
        self.dropout = shape.dropout
        self.explicit = shape.attention == "explicit"
        if self.explicit:
            # minGPT keeps its mask as numbers in every block: 4 seq^2 bytes each, on every rank.
            mask = torch.empty(shape.max_seq, shape.max_seq)
            self.register_buffer("mask", mask, persistent=False)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the mask with 1 where a token may look."""
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
        # As many heads as this rank has: all of them, or its share under tensor parallelism.
        fused = self.qkv(x).view(batch, seq, 3, -1, self.head_width)
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(2))
        mixed = self.attend(query, key, value)
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return F.dropout(projected, self.dropout, self.training)


class GPTFeedForward(nn.Module):
    """The block's two-layer perceptron on [batch, seq, d_model]."""

    def __init__(self, shape: GPTShape, output_std: float) -> None:
        super().__init__()
        self.up = Projection(shape.d_model, shape.expansion * shape.d_model, shape.bias)
        self.down = Projection(shape.expansion * shape.d_model, shape.d_model, shape.bias, output_std)
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.gelu(self.up(x)))
        return F.dropout(projected, self.dropout, self.training)


class GPTBlock(CheckpointedBlock):
    """Attention and feed-forward with their residual connections: the natural FSDP unit."""

    def __init__(self, shape: GPTShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        self.random = shape.dropout > 0
        # GPT-2 scales what flows into the residual stream by its number of contributions.
        output_std = WEIGHT_STD / math.sqrt(2 * shape.layers)
        self.attention_norm = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.attention = GPTAttention(shape, output_std)
        self.feed_forward_norm = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.feed_forward = GPTFeedForward(shape, output_std)

    def transform(self, x: Tensor) -> Tensor:
        """Compute [batch, seq, d_model] to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(ComputesTokenLoss, nn.Module):
    """The model: `gpt(inputs)` gives logits, `gpt(inputs, targets)` the mean cross entropy.

    Inputs and targets are int64 of shape [batch, seq], logits [batch, seq, vocab] in the parameters' dtype.
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
        """Compute logits or the loss.

        Raises:
            WorkloadError: the sequence is longer than the learned positions.
        """
        x = self.token_embedding(inputs)
        if self.position_embedding is not None:
            seq, most = inputs.shape[1], self.position_embedding.num_embeddings
            if seq > most:
                raise WorkloadError(
                    f"the sequence has {seq} tokens, the model {most} positions: build it with seq={seq}"
                )
            x = x + self.position_embedding(positions(seq, inputs.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        # A software profile may replace `token_loss` of this module (tests/sim/software/test_undone.py).
        return self.logits_or_loss(self.final_norm(x), targets, self.fp32_loss, plain=token_loss)


class GPTWorkload(NextTokenWorkload[GPTShape]):
    """A GPT of one shape, with tokens as data."""

    family = FAMILY
    shape_type = GPTShape
    block_classes = (GPTBlock,)

    @property
    def parameters(self) -> int:
        return self.count_parameters(self.default_seq)

    def count_parameters(self, seq: int) -> int:
        """Return the parameters of the model built for `seq` tokens: learned positions grow with it."""
        s = self.spec
        norm = s.d_model * (2 if s.bias else 1)
        biases = (3 + 1 + s.expansion + 1) * s.d_model if s.bias else 0
        block = self.product_weights(0) + biases + 2 * norm
        embeddings = s.vocab * s.d_model * (1 if s.tied else 2)
        positions = seq * s.d_model if s.positions == "learned" else 0
        return s.layers * block + norm + embeddings + positions

    def products(self, layer: int) -> list[Product]:
        width, wide = self.spec.d_model, self.spec.expansion * self.spec.d_model
        sizes = {
            "qkv": (width, 3 * width),
            "proj": (width, width),
            "up": (width, wide),
            "down": (wide, width),
        }
        return [Product(name, *each) for name, each in sizes.items()]

    def tensor_plan(self) -> TensorPlan:
        s = self.spec
        block = BlockPlan(
            readers=("attention", "feed_forward"),
            columns={"attention.qkv": (s.d_model,) * 3, "feed_forward.up": (s.expansion * s.d_model,)},
            rows=("attention.proj", "feed_forward.down"),
            norms=("attention_norm", "feed_forward_norm"),
        )
        embeddings = {"token_embedding": 1, **({"position_embedding": 0} if s.positions == "learned" else {})}
        return TensorPlan(
            (block,), embeddings, ("final_norm",), "lm_head", s.tied, {"heads": s.heads, "vocab": s.vocab}
        )

    def build(self, activation_checkpointing: str = "none", seq: int | None = None) -> nn.Module:
        checkpointing = ActivationCheckpointing.parse(activation_checkpointing)
        return GPT(self.spec, self.resolve_seq(seq), checkpointing)

    def block_flops(self, layer: int, tokens: int, seq: int) -> BlockFlops:
        return replace(super().block_flops(layer, tokens, seq), ends_needed=self.spec.dropout > 0)
