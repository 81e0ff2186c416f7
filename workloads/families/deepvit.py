"""Modules of DeepViT (`vision_workloads.py`).

    image -> patches -> tokens, after a class token (+ positions) -> blocks.0 ... N-1 -> norm -> head

    re-attention:  weights = norm(mix(softmax(query key^T / sqrt(width))));  weights x value

`mix` is a learned heads x heads matrix, `norm` a layer norm across heads. They need the attention weights in
memory, so attention uses matrix products and softmax, not a fused kernel.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.blocks import CheckpointedBlock
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.families.vision_workloads import DeepViTShape
from fsdpbench.workloads.layers import WEIGHT_STD, Projection
from fsdpbench.workloads.losses import class_loss
from fsdpbench.workloads.shape import CHANNELS


class ReAttention(nn.Module):
    """Self-attention of [batch, tokens, d_model] whose weights are mixed across heads."""

    def __init__(self, shape: DeepViTShape, output_std: float) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = Projection(shape.d_model, 3 * shape.d_model, bias=False)
        self.mix = Projection(shape.heads, shape.heads, bias=False, std=shape.heads**-0.5)
        self.mix_norm = nn.LayerNorm(shape.heads)
        self.proj = Projection(shape.d_model, shape.d_model, bias=True, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        fused = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(2))
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(value)
        weights = self.mix_norm(self.mix(weights.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        projected: Tensor = self.proj((weights.type_as(value) @ value).transpose(1, 2).flatten(2))
        return projected


class DeepViTBlock(CheckpointedBlock):
    """Re-attention and feed-forward with residual connections: the natural FSDP unit."""

    def __init__(self, shape: DeepViTShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        output_std = WEIGHT_STD / math.sqrt(2 * shape.layers)
        inner = shape.expansion * shape.d_model
        self.attention_norm = nn.LayerNorm(shape.d_model)
        self.attention = ReAttention(shape, output_std)
        self.feed_forward_norm = nn.LayerNorm(shape.d_model)
        self.up = Projection(shape.d_model, inner, bias=True)
        self.down = Projection(inner, shape.d_model, bias=True, std=output_std)

    def transform(self, x: Tensor) -> Tensor:
        """Keep the shape [batch, tokens, d_model]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class PatchTokens(nn.Module):
    """Images, [batch, 3, image, image], to tokens, [batch, 1 + patches, d_model]."""

    def __init__(self, shape: DeepViTShape) -> None:
        super().__init__()
        self.patch = shape.patch
        self.embedding = Projection(CHANNELS * shape.patch**2, shape.d_model, bias=True)
        self.class_token = nn.Parameter(torch.empty(1, 1, shape.d_model))
        self.positions = nn.Parameter(torch.empty(1, shape.tokens, shape.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.class_token, std=WEIGHT_STD)
        nn.init.normal_(self.positions, std=WEIGHT_STD)

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        rows, columns = height // self.patch, width // self.patch
        cut = images.view(batch, channels, rows, self.patch, columns, self.patch)
        patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        tokens = self.embedding(patches)
        first = self.class_token.to(tokens.dtype).expand(batch, -1, -1)
        return torch.cat((first, tokens), dim=1) + self.positions


class DeepViT(nn.Module):
    """The model: `deepvit(images)` returns logits, `deepvit(images, labels)` the mean cross entropy.

    Images are floating-point [batch, 3, image, image], labels int64 [batch], logits [batch, classes] in the
    parameters' dtype.
    """

    def __init__(self, shape: DeepViTShape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.tokens = PatchTokens(shape)
        self.blocks = nn.ModuleList(DeepViTBlock(shape, checkpointing, i) for i in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.d_model)
        self.head = Projection(shape.d_model, shape.classes, bias=True)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x[:, 0]))
        return logits if labels is None else class_loss(logits, labels)
