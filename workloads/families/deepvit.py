"""DeepViT: a vision transformer whose attention maps are mixed across heads (Zhou et al. 2021, 2103.11886).

    image -> patches -> tokens, behind a class token (+ positions) -> blocks.0 ... N-1 -> norm -> head

    re-attention:  weights = norm(mix(softmax(query key^T / sqrt(width))));  weights x value

`mix` is a learned heads x heads matrix, `norm` a layer norm across heads. Between softmax and mixture they
need the weights in memory, so no fused attention kernel serves; torch's matrix products and softmax do.

FLOPs: a token costs 6 for each weight of a matrix product, 12 x layers x d_model x tokens for attention, and
6 x layers x heads^2 x tokens for mixing; the patches' input needs no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.base import BlockFlops, ForwardFlops, VisionWorkload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing, CheckpointedBlock
from fsdpbench.workloads.inputs import CHANNELS
from fsdpbench.workloads.layers import WEIGHT_STD, Projection
from fsdpbench.workloads.losses import class_loss
from fsdpbench.workloads.shape import check_divides, check_positive


@dataclass(frozen=True)
class DeepViTShape:
    """The shape of a DeepViT.

    Fields: `patch`: pixels along a patch's side; `image`: along the image's; `expansion`: feed-forward width
    / d_model; `classes`.

    Raises:
        ShapeError: a number is below 1, heads do not divide d_model, or patches the image.
    """

    layers: int
    d_model: int
    heads: int
    expansion: int = 4
    patch: int = 16
    image: int = 224
    classes: int = 1000

    def __post_init__(self) -> None:
        check_positive(self, "layers", "d_model", "heads", "expansion", "patch", "image", "classes")
        check_divides(self, "heads", "d_model")
        check_divides(self, "patch", "image")

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def tokens(self) -> int:
        """Return the tokens of an image: its patches and the class token."""
        return self.patches + 1


class ReAttention(nn.Module):
    """Self-attention of [batch, tokens, d_model] with its weights mixed across heads."""

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
    """Re-attention and feed-forward with their residual connections: the natural FSDP unit."""

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
        """Compute [batch, tokens, d_model] to the same."""
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
    """The model: `deepvit(images)` gives logits, `deepvit(images, labels)` the mean cross entropy.

    Images are floating point of shape [batch, 3, image, image], labels int64 of [batch], logits [batch,
    classes] in the parameters' dtype.
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


class DeepViTWorkload(VisionWorkload[DeepViTShape]):
    """A DeepViT of one shape, with images as data."""

    family = "deepvit"
    shape_type = DeepViTShape
    module_type = DeepViT
    block_classes = (DeepViTBlock,)

    @property
    def parameters(self) -> int:
        s = self.spec
        biases = (1 + s.expansion + 1) * s.d_model
        mixing = s.heads**2 + 2 * s.heads
        block = (4 + 2 * s.expansion) * s.d_model**2 + biases + mixing + 4 * s.d_model
        tokens = (CHANNELS * s.patch**2 + 1 + 1 + s.tokens) * s.d_model
        return s.layers * block + tokens + 2 * s.d_model + (s.d_model + 1) * s.classes

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        # 2 a token and weight, attention in full. The patch embedding's input needs no gradient.
        self.resolve_seq(seq)
        s = self.spec
        tokens = batch * s.tokens
        mixing = 2 * tokens * s.heads**2 * s.tokens
        qkv, projection, up, down = (2 * tokens * s.d_model**2 * w for w in (3, 1, s.expansion, s.expansion))
        block = BlockFlops((qkv, mixing, projection, up, down), attention=4 * tokens * s.d_model * s.tokens)
        embedding = 2 * batch * s.patches * CHANNELS * s.patch**2 * s.d_model
        head = 2 * batch * s.d_model * s.classes
        return ForwardFlops([[block] * s.layers], rest=embedding + head, first=embedding)
