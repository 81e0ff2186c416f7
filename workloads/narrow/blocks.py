"""Layers that multiply in mxfp8 and nvfp4, whose elements share scales in blocks, and in fp8.

    mxfp8   torchao's MXFP8 training linear: six casts, of each matrix along the dimension that is summed;
            input and weight are kept in 16 bits and cast again in backward
    nvfp4   torchao's NVFP4 training linear (prototype): all three products in 4 bits; one kernel casts a
            matrix in both directions; backward keeps the casts of forward instead of the input

CPUs have no such products: there, the dequantised matrices are multiplied in float32.

    mxfp8   32 elements in e4m3, scale 2^n in e8m0     OCP Microscaling Formats 1.0; n is rounded up, so that
                                                       nothing saturates (Mishra 2025, arXiv 2506.08027)
    nvfp4   16 elements in e2m1, scale in e4m3         and one per tensor in float32: the largest magnitude
                                                       over 448 x 6 (NVIDIA 2025, arXiv 2509.25149)

Each cast is one operator, like the libraries' kernels: it reads the matrix and writes the result and its
scales, padded to the 128 rows and 4 scales per row that the products require. A real kernel also swizzles
scales inside these tiles, which moves no more bytes; here they are in order, for emulated products.

In nvfp4's backward, matrices that are summed over tokens are first rotated (by a 16 x 16 Hadamard matrix with
fixed signs, which spreads outliers and does not change the product), and output gradients are rounded
stochastically.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from fsdpbench.workloads.layers import Projection, replace_projections
from fsdpbench.workloads.narrow.eight_bits import EightBitLinear, NarrowlyGathered, rows_of

_ops: Any = torch.ops.fsdpbench_workloads


class Blocks(NamedTuple):
    """A matrix [rows, summed], the scales of its blocks, and the scale of the whole tensor, if any."""

    data: Tensor
    scales: Tensor
    whole: Tensor | None = None


def product(a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
    """Return `a @ b^T` in `dtype`."""
    if a.data.device.type == "cpu":
        return _emulated(a, b).to(dtype)
    if a.whole is None or b.whole is None:
        both = (a.data, b.data.t(), a.scales, b.scales)
        product_of_both: Tensor = torch.ops.aten._scaled_mm.default(*both, out_dtype=dtype)
        return product_of_both
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return scaled_mm(
        a.data,
        b.data.t(),
        [a.scales, a.whole],
        kinds,
        [b.scales, b.whole],
        kinds,
        swizzles,
        swizzles,
        output_dtype=dtype,
    )


def _emulated(a: Blocks, b: Blocks) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        result = dequantised(*a[:2]) @ dequantised(*b[:2]).t()
    for whole in (a.whole, b.whole):
        result = result if whole is None else result * whole
    return result


class MxLinear(torch.autograd.Function):
    """Product `x @ w^T` of x, [..., in], and a weight, [out, in], in mxfp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = rows_of(x)
        y = product(Blocks(*_ops.mxfp8_rows(rows)), Blocks(*_ops.mxfp8_rows(weight)), x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = rows_of(gradient)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            w = Blocks(*_ops.mxfp8_columns(weight))
            of_x = product(Blocks(*_ops.mxfp8_rows(rows)), w, gradient.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            read = Blocks(*_ops.mxfp8_columns(rows_of(x)))
            of_weight = product(Blocks(*_ops.mxfp8_columns(rows)), read, gradient.dtype)
        return of_x, of_weight


class Nvfp4Linear(torch.autograd.Function):
    """Product `x @ w^T` of x, [..., in], and a weight, [out, in], in nvfp4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        by_rows, by_columns = _both(rows_of(x), stochastic=False)
        amax = weight.abs().max().float()
        data, scales, turned, turned_scales = _ops.nvfp4_weight(weight, amax)
        whole = nvfp4_factor(amax)
        assert by_columns.whole is not None
        ctx.save_for_backward(*by_columns, turned, turned_scales, whole)
        ctx.shape = x.shape
        return product(by_rows, Blocks(data, scales, whole), x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        saved = ctx.saved_tensors
        by_rows, by_columns = _both(rows_of(gradient), stochastic=True)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(by_rows, Blocks(*saved[3:]), gradient.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = product(by_columns, Blocks(*saved[:3]), gradient.dtype)
        return of_x, of_weight


def _both(x: Tensor, stochastic: bool) -> tuple[Blocks, Blocks]:
    """Cast `x` for products that sum over its columns and, rotated, for those that sum over its rows."""
    amax = _ops.nvfp4_amax(x)
    data, scales, turned, turned_scales = _ops.nvfp4_both(x, *amax, stochastic)
    whole = [nvfp4_factor(each) for each in amax]
    return Blocks(data, scales, whole[0]), Blocks(turned, turned_scales, whole[1])


MX_BLOCK, NV_BLOCK = 32, 16
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_TILE_ROWS, _TILE_SCALES = 128, 4
_SMALLEST = 1e-30


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x, [m, k], to e4m3; return it and its scales in e8m0, one per block of a row."""
    blocks = x.float().unflatten(1, (-1, MX_BLOCK))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=_SMALLEST)
    scale = torch.exp2(torch.ceil(torch.log2(amax / _E4M3_MAX)))
    data = (blocks / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return data.flatten(1), _padded(scale.squeeze(-1).to(torch.float8_e8m0fnu))


def _mxfp8_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    scales = x.new_empty(_tiles(m, k // MX_BLOCK), dtype=torch.float8_e8m0fnu)
    return x.new_empty((m, k), dtype=torch.float8_e4m3fn), scales


def nvfp4(
    x: Tensor, amax: Tensor, square: bool = False, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cast x, [m, k], to e2m1, two per byte; return it and its scales in e4m3. `amax`: its largest magnitude.

    `square`: blocks of 16 x 16 share a scale, so that the transposed matrix is cast to the same numbers.
    `noise`, [m, k] in [0, 1): round up if it is below the value's position between two levels.
    """
    blocks = x.float().unflatten(1, (-1, NV_BLOCK))
    most = blocks.abs().amax(dim=-1)
    if square:
        most = most.unflatten(0, (-1, NV_BLOCK)).amax(dim=1).repeat_interleave(NV_BLOCK, 0)
    whole = nvfp4_factor(amax)
    scale = (most / _E2M1_MAX / whole).clamp(_SMALLEST, _E4M3_MAX).to(torch.float8_e4m3fn)
    factor = (scale.float() * whole)[..., None]
    wanted = torch.where(factor > 0, blocks / factor, 0).flatten(1)
    numbers = _rounded(wanted.abs().clamp(max=_E2M1_MAX), noise) + 8 * (wanted < 0)
    packed = (numbers[:, ::2] + 16 * numbers[:, 1::2]).to(torch.uint8)
    return packed.view(torch.float4_e2m1fn_x2), _padded(scale)


def nvfp4_factor(amax: Tensor) -> Tensor:
    """Return the scale of the whole tensor, in float32."""
    return amax.float().clamp(min=_SMALLEST) / (_E4M3_MAX * _E2M1_MAX)


def _rounded(magnitudes: Tensor, noise: Tensor | None) -> Tensor:
    """Return indices of levels: the nearest (of two equally near ones the even), or a drawn one."""
    levels = torch.tensor(_LEVELS)
    if noise is not None:
        low = (torch.bucketize(magnitudes, levels, right=True) - 1).clamp(max=len(_LEVELS) - 2)
        place = (magnitudes - levels[low]) / (levels[low + 1] - levels[low])
        return low + (noise < place)
    found = torch.zeros_like(magnitudes, dtype=torch.int64)
    for index, middle in enumerate(((levels[1:] + levels[:-1]) / 2).tolist()):
        found += magnitudes >= middle if index % 2 else magnitudes > middle
    return found


def rotated(x: Tensor) -> Tensor:
    """Return the rows of x, [m, k], with every 16 elements rotated, in float32."""
    hadamard = torch.ones(1, 1)
    for _ in range(4):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    return ((x.float().unflatten(1, (-1, 16)) * torch.tensor(_SIGNS)) @ hadamard / 4).flatten(1)


def dequantised(data: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in float32, without the scale of the whole tensor."""
    if data.dtype is torch.float4_e2m1fn_x2:
        packed = data.view(torch.uint8).int()
        numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        values, block = torch.tensor(_LEVELS)[numbers & 7] * (1 - 2 * (numbers >> 3)), NV_BLOCK
    else:
        values, block = data.float(), MX_BLOCK
    rows, count = len(values), values.shape[1] // block
    factors = scales.float()[:rows, :count, None]
    return (values.unflatten(1, (-1, block)) * factors).flatten(1)


def _tiles(rows: int, scales: int) -> tuple[int, int]:
    return math.ceil(rows / _TILE_ROWS) * _TILE_ROWS, math.ceil(scales / _TILE_SCALES) * _TILE_SCALES


def _padded(scales: Tensor) -> Tensor:
    padded = torch.zeros(_tiles(*scales.shape), dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    return padded.view(scales.dtype)


def _nvfp4_both(
    x: Tensor, by_rows: Tensor, by_columns: Tensor, stochastic: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    noise = [torch.rand(shape) if stochastic else None for shape in (x.shape, x.t().shape)]
    turned = rotated(x.t())
    return *nvfp4(x, by_rows, noise=noise[0]), *nvfp4(turned, by_columns, noise=noise[1])


def _nvfp4_both_shapes(x: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def of(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        scales = x.new_empty(_tiles(rows, columns // NV_BLOCK), dtype=torch.float8_e4m3fn)
        return x.new_empty((rows, columns // 2), dtype=torch.float4_e2m1fn_x2), scales

    return *of(*x.shape), *of(*x.t().shape)


_LIBRARY = torch.library.Library("fsdpbench_workloads", "FRAGMENT")
for _schema, _run, _shapes in (
    ("mxfp8_rows(Tensor x) -> (Tensor, Tensor)", mxfp8, _mxfp8_shapes),
    ("mxfp8_columns(Tensor x) -> (Tensor, Tensor)", lambda x: mxfp8(x.t()), lambda x: _mxfp8_shapes(x.t())),
    (
        "nvfp4_amax(Tensor x) -> (Tensor, Tensor)",
        lambda x: (x.abs().amax().float(), rotated(x.t()).abs().amax()),
        lambda x: tuple(x.new_empty((), dtype=torch.float32) for _ in range(2)),
    ),
    (
        "nvfp4_both(Tensor x, Tensor by_rows, Tensor by_columns, bool stochastic) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _nvfp4_both,
        _nvfp4_both_shapes,
    ),
    (
        "nvfp4_weight(Tensor w, Tensor amax) -> (Tensor, Tensor, Tensor, Tensor)",
        lambda w, amax: (*nvfp4(w, amax, square=True), *nvfp4(w.t(), amax, square=True)),
        _nvfp4_both_shapes,
    ),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _run, "CPU")
    _LIBRARY.impl(_schema.split("(")[0], _shapes, "Meta")


_LINEARS = {"fp8": EightBitLinear, "mxfp8": MxLinear, "nvfp4": Nvfp4Linear}


class NarrowProjection(Projection):
    """Linear layer whose products, forward and backward, run in `kind`, with weight and bias of `base`."""

    def __init__(self, base: Projection, kind: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.std = base.in_features, base.out_features, base.std
        self.weight, self.bias, self.kind = base.weight, base.bias, kind

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _LINEARS[self.kind].apply(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def narrow(model: nn.Module, block_classes: tuple[type[nn.Module], ...], kind: str) -> None:
    """Make the linear layers of the blocks, except routers, multiply in `kind`, in place."""
    replace_projections(model, block_classes, lambda name, layer: NarrowProjection(layer, kind))


def gather_narrowly(model: nn.Module) -> None:
    """Make FSDP2, when applied afterwards, gather the weights of `model`'s fp8 layers in fp8."""
    for layer in model.modules():
        if isinstance(layer, NarrowProjection) and layer.kind == "fp8":
            layer.weight = nn.Parameter(NarrowlyGathered(layer.weight.detach()))
