"""Shapes and workloads of the vision families.

RegNet-Y: a network of grouped convolutions with squeeze and excitation (Radosavovic 2020). FLOPs: 2 per
multiplication of a convolution, three times (forward, and backward to inputs and to weights); the stem's
input needs no gradient.

DeepViT: a vision transformer that mixes attention maps across heads (Zhou et al. 2021, 2103.11886). FLOPs:
per token 6 for each weight of a matrix product, 12 x layers x d_model x tokens for attention, and 6 x layers
x heads^2 x tokens for mixing; the patches' input needs no gradient.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fsdpbench.workloads.base import BlockFlops, ForwardFlops, VisionWorkload
from fsdpbench.workloads.shape import (
    CHANNELS,
    ShapeError,
    check_divides,
    check_layers,
    check_least,
    error_text,
)


def _numbers(field: str, text: str) -> list[int]:
    """Parse `32-64` as numbers. Raise `ShapeError` unless the text is a list of numbers of at least 1."""
    parts = str(text).split("-")
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
        raise ShapeError(error_text("vision_workloads.numbers", field, text))
    return [int(part) for part in parts]


def _halved(side: int) -> int:
    """Return the side after a 3x3 convolution with stride 2 (or 1x1) and padding."""
    return (side - 1) // 2 + 1


@dataclass(frozen=True)
class RegNetShape:
    """The shape of a RegNet-Y.

    Fields: `widths` and `depths`: channels and blocks of each stage, as in `32-64-128`; `group_width`:
    channels per group of the 3x3 convolutions; `stem`: channels of the first convolution; `squeeze`: the
    block's input width divided by the excitation's hidden width; `image`: pixels per side; `classes`.

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
        check_least(self, "group_width", "stem", "squeeze", "image", "classes")
        widths, depths = _numbers("widths", self.widths), _numbers("depths", self.depths)
        if len(widths) != len(depths):
            raise ShapeError(error_text("vision_workloads.stages", len(widths), len(depths)))
        check_layers(sum(depths), "depths")
        for width in widths:
            if width % self.group_width:
                raise ShapeError(error_text("vision_workloads.group_width", self.group_width, width))

    def blocks(self) -> "Iterator[BlockShape]":
        """Yield the shapes of the blocks in order."""
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
    """A block: input and output channels, groups, hidden width of the excitation, pixels per side of the
    input, and the stride of its 3x3 convolution."""

    inputs: int
    width: int
    groups: int
    hidden: int
    side: int
    stride: int

    @property
    def has_projection(self) -> bool:
        """Return whether the shortcut needs a convolution."""
        return self.stride > 1 or self.inputs != self.width

    @property
    def parameters(self) -> int:
        convolutions = self.width * (self.inputs + 9 * self.width // self.groups + self.width)
        excitation = 2 * self.width * self.hidden + self.width + self.hidden
        shortcut = self.width * (self.inputs + 2) if self.has_projection else 0
        return convolutions + excitation + shortcut + 3 * 2 * self.width

    @property
    def forward_flops(self) -> tuple[int, ...]:
        """Return the FLOPs of each convolution in one image's forward, in order."""
        pixels = self.side**2
        pixels_out = _halved(self.side) ** 2 if self.stride == 2 else pixels
        enter = pixels * self.inputs * self.width
        grouped = pixels_out * self.width * 9 * self.width // self.groups
        excitation = self.width * self.hidden
        multiplications = [enter, grouped, excitation, excitation, pixels_out * self.width**2]
        if self.has_projection:
            multiplications.append(pixels_out * self.width * self.inputs)
        return tuple(2 * count for count in multiplications)


class RegNetWorkload(VisionWorkload[RegNetShape]):
    """A RegNet-Y of one shape, with images as data."""

    family = "regnet"
    is_convolutional = True
    shape_type = RegNetShape
    code = "fsdpbench.workloads.families.regnet"
    model_class = "RegNet"
    names_of_blocks = ("RegNetBlock",)

    @property
    def parameters(self) -> int:
        s, blocks = self.spec, list(self.spec.blocks())
        stem = s.stem * (9 * CHANNELS + 2)
        return stem + sum(block.parameters for block in blocks) + (blocks[-1].width + 1) * s.classes

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        # 2 per weight and pixel. The stem's input needs no gradient.
        self.resolve_seq(seq)
        s, blocks = self.spec, list(self.spec.blocks())
        stem = 2 * batch * _halved(s.image) ** 2 * 9 * CHANNELS * s.stem
        head = 2 * batch * blocks[-1].width * s.classes
        stack = [
            BlockFlops(tuple(batch * flops for flops in block.forward_flops), ends_needed=True)
            for block in blocks
        ]
        return ForwardFlops([stack], rest=stem + head, first=stem)


@dataclass(frozen=True)
class DeepViTShape:
    """The shape of a DeepViT.

    Fields: `patch`: pixels per side of a patch; `image`: pixels per side of the image; `expansion`:
    feed-forward width / d_model; `classes`.

    Raises:
        ShapeError: a number is below 1, heads do not divide d_model, or patches do not divide the image.
    """

    layers: int
    d_model: int
    heads: int
    expansion: int = 4
    patch: int = 16
    image: int = 224
    classes: int = 1000

    def __post_init__(self) -> None:
        check_least(self, "layers", "d_model", "heads", "expansion", "patch", "image", "classes")
        check_divides(self, "heads", "d_model")
        check_divides(self, "patch", "image")

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def tokens(self) -> int:
        """Return the number of tokens of an image: its patches and the class token."""
        return self.patches + 1


class DeepViTWorkload(VisionWorkload[DeepViTShape]):
    """A DeepViT of one shape, with images as data."""

    family = "deepvit"
    shape_type = DeepViTShape
    code = "fsdpbench.workloads.families.deepvit"
    model_class = "DeepViT"
    names_of_blocks = ("DeepViTBlock",)

    @property
    def parameters(self) -> int:
        s = self.spec
        biases = (1 + s.expansion + 1) * s.d_model
        mixing = s.heads**2 + 2 * s.heads
        block = (4 + 2 * s.expansion) * s.d_model**2 + biases + mixing + 4 * s.d_model
        tokens = (CHANNELS * s.patch**2 + 1 + 1 + s.tokens) * s.d_model
        return s.layers * block + tokens + 2 * s.d_model + (s.d_model + 1) * s.classes

    def forward_flops(self, batch: int, seq: int | None = None) -> ForwardFlops:
        # 2 per token and weight, attention in full. The patch embedding's input needs no gradient.
        self.resolve_seq(seq)
        s = self.spec
        tokens = batch * s.tokens
        mixing = 2 * tokens * s.heads**2 * s.tokens
        qkv, projection, up, down = (2 * tokens * s.d_model**2 * w for w in (3, 1, s.expansion, s.expansion))
        block = BlockFlops((qkv, mixing, projection, up, down), attention=4 * tokens * s.d_model * s.tokens)
        embedding = 2 * batch * s.patches * CHANNELS * s.patch**2 * s.d_model
        head = 2 * batch * s.d_model * s.classes
        return ForwardFlops([[block] * s.layers], rest=embedding + head, first=embedding)
