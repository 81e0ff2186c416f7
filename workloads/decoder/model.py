"""The model: token embedding, blocks, norm, lm head."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.checkpointing import ActivationCheckpointing, CheckpointedBlock
from fsdpbench.workloads.decoder.attention import DecoderAttention, causal_mask, make_norm
from fsdpbench.workloads.decoder.experts import DecoderFeedForward, Mixture
from fsdpbench.workloads.decoder.rotary import Rope, rotary_tables
from fsdpbench.workloads.decoder.shape import DecoderShape
from fsdpbench.workloads.layers import WEIGHT_STD, ComputesTokenLoss, Lookup, Projection


class DecoderBlock(CheckpointedBlock):
    """Attention and feed-forward (or experts) with their residual connections: the natural FSDP unit."""

    def __init__(self, shape: DecoderShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        self.random = shape.drops
        self.slides, self.parallel = shape.slides(index), shape.parallel
        output_std = WEIGHT_STD / math.sqrt(2 * shape.layers)
        self.attention_norm = make_norm(shape)
        self.attention = DecoderAttention(shape, output_std)
        self.after_attention = make_norm(shape) if shape.post_norms else None
        self.feed_forward_norm = None if shape.parallel else make_norm(shape)
        self.feed_forward: nn.Module
        if shape.is_mixture(index):
            self.feed_forward = Mixture(shape, output_std, index)
        else:
            self.feed_forward = DecoderFeedForward(shape, output_std)
        self.after_feed_forward = make_norm(shape) if shape.post_norms else None

    def transform(
        self,
        x: Tensor,
        cosines: Tensor,
        sines: Tensor,
        local_cosines: Tensor,
        local_sines: Tensor,
        mask: Tensor | None,
        local_mask: Tensor | None,
    ) -> Tensor:
        """[batch, seq, d_model] to the same; sliding layers take the local tables and mask."""
        if self.slides:
            cosines, sines, mask = local_cosines, local_sines, local_mask
        normed = self.attention_norm(x)
        attended = self.attention(normed, cosines, sines, mask)
        if self.feed_forward_norm is None:
            parallel: Tensor = attended + self.feed_forward(normed) + x
            return parallel
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        x = x + attended
        fed: Tensor = self.feed_forward(self.feed_forward_norm(x))
        if self.after_feed_forward is not None:
            fed = self.after_feed_forward(fed)
        return x + fed


class Decoder(ComputesTokenLoss, nn.Module):
    """The model: `decoder(inputs)` gives logits, `decoder(inputs, targets)` the mean cross entropy.

    Inputs and targets are int64 of shape [batch, seq], logits [batch, seq, vocab] in the parameters' dtype.
    """

    def __init__(self, shape: DecoderShape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = Lookup(shape.vocab, shape.d_model)
        self.blocks = nn.ModuleList(
            DecoderBlock(shape, checkpointing, index) for index in range(shape.layers)
        )
        self.final_norm = make_norm(shape)
        self.lm_head = Projection(shape.d_model, shape.vocab, bias=shape.head_bias)
        if shape.tied:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        shape = self.shape
        x = self.token_embedding(inputs)
        if shape.embedding_scale:
            x = x * math.sqrt(shape.d_model)
        x = F.dropout(x, shape.embedding_dropout, self.training)
        context = self._context(inputs.shape[1], x)
        for block in self.blocks:
            x = block(x, *context)
        capped = partial(_capped, cap=shape.logit_cap) if shape.logit_cap else None
        return self.logits_or_loss(self.final_norm(x), targets, shape.fp32_loss, capped)

    def _context(self, seq: int, x: Tensor) -> tuple[Tensor | None, ...]:
        """Tables of rotary positions and masks, of full and of sliding layers; what is the same is shared."""
        shape, rope = self.shape, Rope.parse(self.shape.rope)
        tables = local = rotary_tables(seq, shape.rotary_width, shape.rope_theta, rope, x)
        if shape.local_theta and shape.window:
            local = rotary_tables(seq, shape.rotary_width, shape.local_theta, Rope(), x)
        explicit = shape.attention == "explicit"
        mask = local_mask = causal_mask(seq, 0, x) if explicit else None
        if 0 < shape.window < seq and "S" in shape.layer_pattern:
            local_mask = causal_mask(seq, shape.window, x)
        return (*tables, *local, mask, local_mask)


def _capped(logits: Tensor, cap: float) -> Tensor:
    """Logits bent into -cap to cap."""
    return (logits / cap).tanh() * cap
