"""RegNet-Y: a convolutional network of grouped convolutions with squeeze and excitation (Radosavovic 2020).

    image -> stem -> blocks: stages of widths w1, w2, ..., the first of each halves the sides -> mean -> head

    block:  1x1 to width -> 3x3 in groups -> squeeze, excite -> 1x1 -> + shortcut -> relu

Blocks differ in size by a factor of 200 within one model: a hard case for FSDP, whose units are as uneven.

The batch norms use the statistics of the batch and keep no running ones: nothing here evaluates, buffers
would take a broadcast under DDP, and recomputation would update them twice. They are not `nn.BatchNorm2d`,
which PyTorch's FSDP1 takes out of its units into full-precision units: all systems see the same units.

FLOPs: 2 for each multiplication of a convolution, three times over (forward, and backward to inputs and to
weights); the stem's input needs no gradient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.base import BlockFlops, ForwardFlops, VisionWorkload
from fsdpbench.workloads.checkpointing import ActivationCheckpointing, CheckpointedBlock
from fsdpbench.workloads.inputs import CHANNELS
from fsdpbench.workloads.layers import Projection
from fsdpbench.workloads.losses import class_loss
from fsdpbench.workloads.shape import ShapeError, check_layers, check_positive


def _numbers(field: str, text: str) -> list[int]:
    """Read `32-64` as numbers. Raise `ShapeError` if it is no such list of numbers from 1."""
    parts = str(text).split("-")
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
        raise ShapeError(
            f"shape field {field} is '{text}': it must be numbers from 1 joined by -, as in 32-64"
        )
    return [int(part) for part in parts]


def _halved(side: int) -> int:
    """Return the side after a 3x3 convolution of stride 2 (or 1x1), padded to keep it."""
    return (side - 1) // 2 + 1


@dataclass(frozen=True)
class RegNetShape:
    """The shape of a RegNet-Y.

    Fields: `widths` and `depths`: channels and blocks of each stage, as in `32-64-128`; `group_width`:
    channels a group of the 3x3 convolutions; `stem`: channels of the first convolution; `squeeze`: the
    excitation's hidden width is the block's input width divided by it; `image`: pixels along a side;
    `classes`.

    Raises:
        ShapeError: a number is below 1, widths and depths differ in count, or groups do not divide a width.
    """

    widths: str
    depths: str
    group_width: int
    stem: int = 32
    squeeze: int = 4
    image: int = 224
    classes: int = 1000

    def __post_init__(self) -> None:
        check_positive(self, "group_width", "stem", "squeeze", "image", "classes")
        widths, depths = _numbers("widths", self.widths), _numbers("depths", self.depths)
        if len(widths) != len(depths):
            raise ShapeError(
                f"shape fields widths and depths have {len(widths)} and {len(depths)} stages: "
                "they must have as many"
            )
        check_layers(sum(depths), "depths")
        for width in widths:
            if width % self.group_width:
                raise ShapeError(
                    f"shape field group_width is {self.group_width}: it must divide each of widths, "
                    f"{width} too"
                )

    def blocks(self) -> Iterator[BlockShape]:
        """Yield the blocks' shapes, in order."""
        inputs, side = self.stem, _halved(self.image)
        for width, depth in zip(
            _numbers("widths", self.widths), _numbers("depths", self.depths), strict=True
        ):
            for index in range(depth):
                stride = 2 if index == 0 else 1
                hidden = max(1, round(inputs / self.squeeze))
                yield BlockShape(inputs, width, width // self.group_width, hidden, side, stride)
                inputs, side = width, _halved(side) if stride == 2 else side


@dataclass(frozen=True)
class BlockShape:
    """A block: channels in and out, groups, hidden width of the excitation, pixels along an input's side, and
    the stride of its 3x3 convolution."""

    inputs: int
    width: int
    groups: int
    hidden: int
    side: int
    stride: int

    @property
    def has_projection(self) -> bool:
        """Return whether the shortcut needs a convolution of its own."""
        return self.stride > 1 or self.inputs != self.width

    @property
    def parameters(self) -> int:
        convolutions = self.width * (self.inputs + 9 * self.width // self.groups + self.width)
        excitation = 2 * self.width * self.hidden + self.width + self.hidden
        shortcut = self.width * (self.inputs + 2) if self.has_projection else 0
        return convolutions + excitation + shortcut + 3 * 2 * self.width

    @property
    def forward_flops(self) -> tuple[int, ...]:
        """Return the FLOPs of each convolution of one image's forward pass, in order."""
        pixels = self.side**2
        pixels_out = _halved(self.side) ** 2 if self.stride == 2 else pixels
        enter = pixels * self.inputs * self.width
        grouped = pixels_out * self.width * 9 * self.width // self.groups
        excitation = self.width * self.hidden
        multiplications = [enter, grouped, excitation, excitation, pixels_out * self.width**2]
        if self.has_projection:
            multiplications.append(pixels_out * self.width * self.inputs)
        return tuple(2 * count for count in multiplications)


class Convolution(nn.Conv2d):
    """A convolution that keeps the sides (divided by its stride), with weights as ResNets draw them."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)

    def reset_parameters(self) -> None:
        fan_out = self.kernel_size[0] * self.kernel_size[1] * self.out_channels
        nn.init.normal_(self.weight, std=math.sqrt(2 / fan_out))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class BatchNorm(nn.Module):
    """A norm of each channel of [batch, channels, height, width] by the statistics of the batch.

    Weights count in float32 at least, as cuDNN's half-precision kernel takes them.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight.float(), self.bias.float(), training=True)


class SqueezeExcitation(nn.Module):
    """A scaling of each channel by a weight that all channels' means decide."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.reduce = Convolution(width, hidden, 1, bias=True)
        self.expand = Convolution(hidden, width, 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(dim=(2, 3), keepdim=True)
        return x * self.expand(F.relu(self.reduce(means))).sigmoid()


class RegNetBlock(CheckpointedBlock):
    """A residual bottleneck: the natural FSDP unit."""

    def __init__(self, shape: BlockShape, checkpointing: ActivationCheckpointing, index: int) -> None:
        super().__init__(checkpointing, index)
        width = shape.width
        self.shortcut = Convolution(shape.inputs, width, 1, shape.stride) if shape.has_projection else None
        self.shortcut_norm = BatchNorm(width) if shape.has_projection else None
        self.enter = Convolution(shape.inputs, width, 1)
        self.enter_norm = BatchNorm(width)
        self.grouped = Convolution(width, width, 3, shape.stride, shape.groups)
        self.grouped_norm = BatchNorm(width)
        self.excitation = SqueezeExcitation(width, shape.hidden)
        self.leave = Convolution(width, width, 1)
        self.leave_norm = BatchNorm(width)

    def transform(self, x: Tensor) -> Tensor:
        """Compute [batch, inputs, side, side] to [batch, width, side / stride, side / stride]."""
        hidden = F.relu(self.enter_norm(self.enter(x)), inplace=True)
        hidden = F.relu(self.grouped_norm(self.grouped(hidden)), inplace=True)
        hidden = self.leave_norm(self.leave(self.excitation(hidden)))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + hidden)


class RegNet(nn.Module):
    """The model: `regnet(images)` gives logits, `regnet(images, labels)` the mean cross entropy.

    Images are floating point of shape [batch, 3, image, image], labels int64 of [batch], logits [batch,
    classes] in the parameters' dtype.
    """

    def __init__(self, shape: RegNetShape, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.stem = Convolution(CHANNELS, shape.stem, 3, stride=2)
        self.stem_norm = BatchNorm(shape.stem)
        blocks = list(shape.blocks())
        self.blocks = nn.ModuleList(
            RegNetBlock(block, checkpointing, index) for index, block in enumerate(blocks)
        )
        self.head = Projection(blocks[-1].width, shape.classes, bias=True, std=0.01)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(images)), inplace=True)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits if labels is None else class_loss(logits, labels)


class RegNetWorkload(VisionWorkload[RegNetShape]):
    """A RegNet-Y of one shape, with images as data."""

    family = "regnet"
    is_convolutional = True
    shape_type = RegNetShape
    module_type = RegNet
    block_classes = (RegNetBlock,)

    @property
    def parameters(self) -> int:
        s, blocks = self.spec, list(self.spec.blocks())
        stem = s.stem * (9 * CHANNELS + 2)
        return stem + sum(block.parameters for block in blocks) + (blocks[-1].width + 1) * s.classes

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        # 2 a weight and pixel. The stem's input needs no gradient.
        self.resolve_seq(seq)
        s, blocks = self.spec, list(self.spec.blocks())
        stem = 2 * batch * _halved(s.image) ** 2 * 9 * CHANNELS * s.stem
        head = 2 * batch * blocks[-1].width * s.classes
        stack = [
            BlockFlops(tuple(batch * flops for flops in block.forward_flops), ends_needed=True)
            for block in blocks
        ]
        return ForwardFlops([stack], rest=stem + head, first=stem)
