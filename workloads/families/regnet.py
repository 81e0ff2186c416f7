"""Modules of RegNet-Y (`vision_workloads.py`).

    image -> stem -> blocks in stages of widths w1, w2, ...; the first of each halves sides -> mean -> head

    block:  1x1 to width -> 3x3 in groups -> squeeze, excite -> 1x1 -> + shortcut -> relu

Block sizes differ by a factor of 200 within one model: a hard case for FSDP, whose units are equally uneven.

Batch norms use the statistics of the batch and keep no running statistics: nothing here evaluates, DDP would
have to broadcast such buffers, and recomputation would update them twice. They are not `nn.BatchNorm2d`,
which PyTorch's FSDP1 moves into separate full-precision units: so all systems have the same units.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdpbench.workloads.blocks import CheckpointedBlock
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.families.vision_workloads import BlockShape, RegNetShape
from fsdpbench.workloads.layers import Projection
from fsdpbench.workloads.losses import class_loss
from fsdpbench.workloads.shape import CHANNELS


class Convolution(nn.Conv2d):
    """Convolution that keeps the sides (divided by its stride), with initial weights as in ResNets."""

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
    """Norm of each channel of [batch, channels, height, width] by the statistics of the batch.

    Weights are at least float32, as cuDNN's half-precision kernel requires.
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
    """Scaling of each channel by a weight computed from the means of all channels."""

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
        """Return [batch, width, side / stride, side / stride] for [batch, inputs, side, side]."""
        hidden = F.relu(self.enter_norm(self.enter(x)), inplace=True)
        hidden = F.relu(self.grouped_norm(self.grouped(hidden)), inplace=True)
        hidden = self.leave_norm(self.leave(self.excitation(hidden)))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + hidden)


class RegNet(nn.Module):
    """The model: `regnet(images)` returns logits, `regnet(images, labels)` the mean cross entropy.

    Images are floating-point [batch, 3, image, image], labels int64 [batch], logits [batch, classes] in the
    parameters' dtype.
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
