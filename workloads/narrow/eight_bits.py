"""Products in fp8 with one scale per tensor, recomputed for each cast ("dynamic tensorwise").

The recipe of torchao's `Float8Linear` (its default `Float8LinearConfig`; formats after Micikevicius et al.
2022, arXiv 2209.05433: e4m3 for inputs and weights, e5m2 for gradients, whose range is wider)::

    forward           y  = x8 @ w8^T      x8, w8 in e4m3
    input's gradient  dx = g8 @ w8        g8 in e5m2; w8 copied, stored by columns
    weight's gradient dw = g8^T @ x8      g8 copied transposed, x8 copied, stored by columns

`torch._scaled_mm` accepts only a first factor stored by rows and a second stored by columns; hence the
copies. `x` itself is saved for backward, shared by layers that read the same tensor, and cast again.

FSDP2 can gather weights in fp8, half the bytes of bf16 (torch's all-gather extensions):

    NarrowlyGathered   a sharded weight: float32 for the optimizer; requests an all-gather in fp8
    EightBitWeight     the unsharded weight as gathered, with its scale; only `EightBitLinear` reads it

All ranks must use the same scale, from the largest magnitude of the whole weight. `scale_weights` computes
the scales of all weights with one all-reduce after each optimizer step; before the first step, each weight
has its own. Like torchao's `enable_fsdp_float8_all_gather` with `precompute_float8_dynamic_scale_for_fsdp`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpbench.base.torch_internals import tree_map_only, wrapper_subclass

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-12


class EightBits(NamedTuple):
    """A matrix in fp8, and the float32 scalar by which its elements are multiplied."""

    data: Tensor
    inverse: Tensor


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float32 factor that maps the largest magnitude to the largest number of `dtype`."""
    # In float64, like torchao: compiled and eager float32 divisions differ.
    return (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=_SMALLEST)).to(torch.float32)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x * scale` in fp8, clamped to finite numbers."""
    most = torch.finfo(dtype).max
    return (x.to(torch.float32) * scale).clamp(min=-most, max=most).to(dtype)


def quantise(x: Tensor, dtype: torch.dtype) -> EightBits:
    """Return `x` in fp8, scaled by its largest magnitude."""
    scale = scale_of(x.abs().max(), dtype)
    return EightBits(cast(x, scale, dtype), scale.reciprocal())


def product(a: EightBits, b: EightBits, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return `a @ b` in `dtype`. `fast`: do not promote the tensor cores' sums (only in forward)."""
    left, right = a.data.contiguous(), b.data
    if right.stride(0) != 1:
        right = right.t().contiguous().t()
    scaled: Tensor = torch.ops.aten._scaled_mm.default(
        left, right, a.inverse, b.inverse, out_dtype=dtype, use_fast_accum=fast
    )
    return scaled


class EightBitLinear(torch.autograd.Function):
    """Product `x @ w^T` of x, [..., in], and w, [out, in], which is cast here or was gathered in fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        w8 = _of_weight(weight)
        y = product(quantise(rows_of(x), E4M3), EightBits(w8.data.t(), w8.inverse), x.dtype, fast=True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g8 = quantise(rows_of(gradient), E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(g8, _of_weight(weight), gradient.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            turned = EightBits(g8.data.t(), g8.inverse)
            of_weight = product(turned, quantise(rows_of(x), E4M3), gradient.dtype)
        return of_x, of_weight


def _of_weight(weight: Tensor) -> EightBits:
    data = getattr(weight, "data8", None)  # gathered in fp8 (`EightBitWeight`)
    return quantise(weight, E4M3) if data is None else EightBits(data, weight.inverse8)  # type: ignore[attr-defined]


def rows_of(x: Tensor) -> Tensor:
    """Return x, [..., n], as [rows, n]."""
    return x.reshape(-1, x.shape[-1])


_aten = torch.ops.aten
_KEEPS_CLASS = frozenset(
    {
        _aten.detach.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor,
        _aten.view.default, _aten.as_strided.default, _aten._to_copy.default, _aten._pin_memory.default,
        _aten.split.Tensor, _aten.clone.default, _aten.alias.default, _aten.new_empty.default,
    }
)  # fmt: skip
"""Operators by which FSDP2 makes a weight a shard, or moves a shard. Optimizer moments are plain tensors."""
_VIEWS = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default)


def _around(cls: type[Tensor], inner: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of a wrapper subclass with the shape, strides and device of `inner`."""
    strides, offset = inner.stride(), int(inner.storage_offset())
    return wrapper_subclass(
        cls, inner.shape, strides=strides, storage_offset=offset, dtype=dtype, device=inner.device
    )


class NarrowlyGathered(torch.Tensor):
    """A (sharded) weight that wraps the tensor `held`. `scale`: the whole weight's scale, once known."""

    held: Tensor
    scale: Tensor | None

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return _around(cls, held, held.dtype)

    def __init__(self, held: Tensor) -> None:
        self.held, self.scale = held, None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NarrowlyGathered({self.held!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], *_: Any) -> "NarrowlyGathered":
        return NarrowlyGathered(inner["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map_only(NarrowlyGathered, lambda each: each.held, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func in _KEEPS_CLASS:
            return tree_map_only(Tensor, NarrowlyGathered, result)
        if args and isinstance(args[0], NarrowlyGathered) and result is args[0].held:
            return args[0]  # an in-place operator
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return the shard's fp8 bytes, padded to the largest in `mesh`, and the inverse of its scale."""
        scale = self.scale
        if scale is None:
            scale = scale_of(_of_all(_magnitude(self.held), mesh.get_group()), E4M3)
        data = cast(self.held, scale, E4M3).view(torch.uint8)  # gloo cannot gather fp8
        missing = -(-outer_size[0] // mesh.size()) - len(data)
        if missing:
            data = torch.cat((data, data.new_zeros(missing, data.shape[1])))
        return (data,), (scale.reciprocal(),)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: tuple[Tensor], param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the whole weight, or set the new scale of `out`, which shares the gathered memory."""
        if out is not None:
            out.inverse8 = metadata[0]
            return None
        return EightBitWeight(outputs[0].view(E4M3), metadata[0], param_dtype), outputs


class EightBitWeight(torch.Tensor):
    """A whole weight in fp8 that pretends to have `dtype`, like its gradient."""

    data8: Tensor
    inverse8: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, inverse8: Tensor, dtype: torch.dtype) -> Any:
        return _around(cls, data8, dtype)

    def __init__(self, data8: Tensor, inverse8: Tensor, dtype: torch.dtype) -> None:
        self.data8, self.inverse8 = data8, inverse8

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"EightBitWeight({list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["data8", "inverse8"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], dtype: torch.dtype, *_: Any) -> "EightBitWeight":
        return EightBitWeight(inner["data8"], inner["inverse8"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _VIEWS:
            raise NotImplementedError(f"{func}: a weight gathered in fp8 is read by its own layer alone")
        whole = args[0]
        return EightBitWeight(func(whole.data8, *args[1:], **(kwargs or {})), whole.inverse8, whole.dtype)


@torch.no_grad()
def scale_weights(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in fp8 with one all-reduce of magnitudes."""
    every: list[Any] = list(model.parameters())
    weights = [each for each in every if isinstance(getattr(each, "_local_tensor", None), NarrowlyGathered)]
    if not weights:
        return
    shards: list[Any] = [weight._local_tensor for weight in weights]
    mesh = weights[0].device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    magnitudes = torch.stack(_magnitudes([shard.held for shard in shards]))
    scales = scale_of(_of_all(magnitudes, group), E4M3)
    for shard, scale in zip(shards, scales.unbind(), strict=True):
        shard.scale = scale


def _magnitude(x: Tensor) -> Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())  # a rank may have no rows


def _magnitudes(shards: list[Tensor]) -> list[Tensor]:
    if all(shard.numel() for shard in shards):
        return list(_aten._foreach_norm.Scalar(shards, float("inf")))
    return [_magnitude(shard) for shard in shards]


def _of_all(magnitudes: Tensor, group: Any) -> Tensor:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(magnitudes, dist.ReduceOp.MAX, group)
    return magnitudes
