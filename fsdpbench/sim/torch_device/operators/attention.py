"""`scaled_dot_product_attention` on the device: the kernel that a GPU chooses; and shape rules torch lacks.

torch's fallback for unknown devices composes attention of matrix products and a softmax, with a matrix of
scores in memory. CUDA's choice is flash attention for half-precision inputs without a mask, and the
memory-efficient kernel for masks, float32 and values of another head size. Flash attention takes grouped
queries directly, the other expanded keys and values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.torch_device.strict.words import cpp_type, error_text, refuse_broadcast, sizes
from fsdpbench.sim.torch_device.tensors import is_on_device

_NAMES = table_beside(__file__, "names.toml")["attention"]
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZE = 256
_FLASH, _EFFICIENT, _COMPOSED = "flash", "efficient", "composed"
# Rows of masks must begin at multiples of this many elements.
_MASK_ALIGNMENT = 16


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention of (batch, heads, length, head size) tensors; a missing batch dimension is added.

    `attn_mask` is boolean or added to the scores. Raises `RuntimeError` for shapes that do not fit, and where
    no kernel that `sdpa_kernel` leaves takes them.
    """
    _refuse_misfits(query, key, value, attn_mask, is_causal)
    ops = torch.ops.aten
    unbatched = query.dim() == key.dim() == value.dim() == 3
    if unbatched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    kernel = _choose_kernel(query, key, value, attn_mask, enable_gqa)
    if kernel == _COMPOSED:
        if not torch.backends.cuda.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        composed = ops._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return composed.squeeze(0) if unbatched else composed
    heads, key_heads, size = query.shape[1], key.shape[1], query.shape[-1]
    if kernel == _FLASH:
        if size % 8:
            scale = size**-0.5 if scale is None else scale
            pad = torch.nn.functional.pad  # the head size, to a multiple of 8
            query, key, value = (pad(each, (0, -size % 8)) for each in (query, key, value))
        result: Any = ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        result = result[..., :size] if size % 8 else result
    else:
        if heads != key_heads:
            key = key.repeat_interleave(heads // key_heads, dim=1)
            value = value.repeat_interleave(heads // key_heads, dim=1)
        mask = None if attn_mask is None else _prepare_mask(attn_mask, query, key)
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        result = ops._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
    return result.squeeze(0) if unbatched else result


def _choose_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """Return the kernel that CUDA takes. Broadcast batches or heads, other dimensions than 4, and a choice of
    `torch.nn.attention.sdpa_kernel` without fused kernels compose attention. Raises `RuntimeError` for heads
    that do not fit."""
    settings = torch.backends.cuda
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return _COMPOSED
    heads, key_heads = query.shape[1], key.shape[1]
    broadcast = 1 in (heads, key_heads) or key_heads != value.shape[1]
    if heads != key_heads and not broadcast and (not enable_gqa or heads % key_heads):
        raise RuntimeError(error_text("attention.heads", heads, key_heads))
    grouped = enable_gqa and key_heads == value.shape[1] and heads % key_heads == 0
    if not query.shape[0] == key.shape[0] == value.shape[0] or (heads != key_heads and not grouped):
        return _COMPOSED
    flash = mask is None and query.dtype in _FLASH_DTYPES and query.shape[-1] <= _FLASH_HEAD_SIZE
    if flash and query.shape[-1] == value.shape[-1] and settings.flash_sdp_enabled():
        return _FLASH
    others = settings.mem_efficient_sdp_enabled() or settings.cudnn_sdp_enabled()
    return _EFFICIENT if others and key_heads == value.shape[1] else _COMPOSED


def fits_flash(params: Any, debug: bool = False) -> bool:
    """Answer `torch.backends.cuda.can_use_flash_attention`, which is false for devices that torch lacks."""
    query = params.query
    takes = is_on_device(query) and params.attn_mask is None and query.dtype in _FLASH_DTYPES
    takes = takes and query.shape[-1] <= _FLASH_HEAD_SIZE and torch.backends.cuda.flash_sdp_enabled()
    if query.is_nested and not takes:  # torch goes on after a `NotImplementedError`
        raise RuntimeError(error_text("attention.nested"))  # fmt: skip
    return bool(takes)


def _refuse_misfits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> None:
    """Raise torch's errors of all devices."""
    if query.dtype is not key.dtype or query.dtype is not value.dtype:
        raise RuntimeError(error_text("attention.dtypes", cpp_type(query), cpp_type(key), cpp_type(value)))
    if query.device != key.device or query.device != value.device:
        raise RuntimeError(error_text("attention.devices", query.device, key.device, value.device))
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise RuntimeError(error_text("attention.dimensions", query.dim(), key.dim(), value.dim()))
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(error_text("attention.shapes", sizes(query), sizes(key), sizes(value)))
    refuse_broadcast(query.shape[:-3], key.shape[:-3])
    refuse_broadcast(query.shape[:-3], value.shape[:-3])
    if mask is None:
        return
    if mask.dim() < 2:
        raise IndexError("Dimension out of range (expected to be in range of [-1, 0], but got -2)")
    if is_causal:
        raise RuntimeError(error_text("attention.mask_and_causal"))
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(error_text("attention.mask", cpp_type(mask), cpp_type(query)))


def _prepare_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as the kernel expects it: added to the scores, aligned, expanded over batch and heads."""
    if mask.dtype is torch.bool:
        allowed = mask
        mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(allowed.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    if columns % _MASK_ALIGNMENT and columns > 1:
        mask = torch.nn.functional.pad(mask, (0, -columns % _MASK_ALIGNMENT))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def register_attention() -> torch.library.Library:
    """Replace torch's composition; the caller must keep the returned library."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "PrivateUse1")
    return library


def _per_channel(x: Tensor) -> Tensor:
    """Return a channel-wise statistic, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((x.shape[1],), dtype=dtype)


def _two(x: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Return mean and inverse standard deviation."""
    return _per_channel(x), _per_channel(x)


def _backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sums for the input's gradient, and the gradients of weight and bias; empty if not required."""
    sums = [_per_channel(x) if input_g else x.new_empty((0,)) for _ in range(2)]
    dtype = x.dtype if weight is None else weight.dtype
    grads = [x.new_empty((x.shape[1] if wanted else 0,), dtype=dtype) for wanted in (weight_g, bias_g)]
    return sums[0], sums[1], grads[0], grads[1]


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    """Return gradients of both kinds of gates, the old state, and both biases (empty without them)."""
    batch, gates = grad.shape[0], 3 * grad.shape[1]
    biases = [grad.new_empty((gates if has_bias else 0,)) for _ in range(2)]
    return grad.new_empty((batch, gates)), grad.new_empty((batch, gates)), torch.empty_like(grad), *biases


def _bins(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return `bincount`'s result of `minlength` bins; values beyond are assumed absent."""
    if not minlength:
        raise NotImplementedError("bincount without minlength has as many bins as its largest value says")
    if weights is None:
        return x.new_empty((minlength,), dtype=torch.int64)
    return x.new_empty((minlength,), dtype=torch.float32 if weights.dtype is torch.float32 else torch.float64)


def _into(name: str) -> Callable[..., Tensor]:
    """Return the operator that writes into `out`, by the rule of the one that makes its result."""

    def rule(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        made: Tensor = getattr(torch.ops.aten, name).default(*args, **kwargs)
        if out.dtype is not made.dtype:
            raise RuntimeError(f"{name}: out is {out.dtype}, and the result {made.dtype}")
        return out if out.shape == made.shape else out.resize_(made.shape)

    return rule


def _least_squares(a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Return `lstsq`'s results of a matrix of full rank, which CUDA's only driver (gels) expects."""
    vector, (rows, columns) = a.dim() - 1 == b.dim() and b.shape[-1] == a.shape[-2], a.shape[-2:]
    solution = a.mT @ (b.unsqueeze(-1) if vector else b)
    residuals = solution.new_empty((*solution.shape[:-2], solution.shape[-1]) if rows > columns else (0,))
    rank = a.new_empty((0,), dtype=torch.int64)
    return solution.squeeze(-1) if vector else solution, residuals, rank, a.new_empty((0,))


_BY_KIND: dict[str, Callable[..., Any]] = {
    "like_first": lambda x, *others: torch.empty_like(x),
    "like_second": lambda grad, x, *others: torch.empty_like(x),
    "quantised": lambda x, *others: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)),
    "quantised_backward": lambda grad, *others: tuple(map(torch.empty_like, others[:3])),
}
SHAPE_RULES: dict[str, Callable[..., Any]] = {
    **{name: _BY_KIND[kind] for kind, names in _NAMES.items() for name in names},
    "linalg_lstsq": _least_squares,
    "geqrf": lambda a: (torch.empty_like(a), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))),
    "_padded_dense_to_jagged_forward": lambda x, offsets, rows: x.new_empty((rows, *x.shape[2:])),
    **{
        f"{name}.out": _into(name)
        for name in ("_scaled_mm", "_scaled_mm_v2")
        if hasattr(torch.ops.aten, name)
    },
    "addmm.dtype": lambda added, a, b, to, **scales: torch.mm(a, b, out_dtype=to),
    "baddbmm.dtype": lambda added, a, b, to, **scales: torch.bmm(a, b, out_dtype=to),
    "bincount": _bins,
    "batch_norm_stats": _two,
    "batch_norm_gather_stats_with_counts": _two,
    "batch_norm_backward_reduce": _backward_reduce,
    # The new state; for backward: three gates, the old state, the hidden part of the new one.
    "_thnn_fused_gru_cell": lambda x, h, hx, *biases: (hx.clone(), hx.new_empty((len(hx), 5 * hx.shape[1]))),
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


def register_shape_rules() -> torch.library.Library:
    """Give torch's meta device the rules it lacks; the caller must keep the returned library.

    torch has rules of `SyncBatchNorm`'s and GRUs' operators for CUDA only, and none for CTC's backward,
    `bincount` with `minlength`, and scaled products written into a tensor. Its rules of added products
    multiply by the dtype of the result (`addmm` until 2.12, `baddbmm` still in 2.13).
    """
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name, rule in SHAPE_RULES.items():
        library.impl(name, rule, allow_override=True)
    return library
