"""`scaled_dot_product_attention` on the device: flash attention, as a GPU would choose.

Without this, torch would compose attention of matrix products and a softmax (its way for devices that it does
not know), with a matrix of scores in memory. The choice is CUDA's: flash attention for half-precision inputs
without a mask, the memory-efficient kernel for masks and float32. Grouped queries are taken as they are by
flash attention, and by expanded keys and values otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdpbench.sim.torch_device.strict.words import cpp_type, refuse_broadcast, sizes

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZE = 256
# The kernels want rows of masks to begin at multiples of so many elements.
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
    """Attention of (batch, heads, length, head size) tensors; a missing batch dimension is added.

    Raises RuntimeError for what does not fit.
    """
    _refuse_misfits(query, key, value, attn_mask, is_causal)
    unbatched = query.dim() == 3
    if unbatched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and (not enable_gqa or heads % key_heads):
        raise RuntimeError(
            f"scaled_dot_product_attention: {heads} query heads and {key_heads} key heads; grouped queries "
            "need enable_gqa=True and a whole number of query heads for each key head"
        )
    ops = torch.ops.aten
    if attn_mask is None and query.dtype in _FLASH_DTYPES and query.shape[-1] <= _FLASH_HEAD_SIZE:
        size = query.shape[-1]
        if size % 8:
            scale = size**-0.5 if scale is None else scale
            query, key, value = (_pad_head(tensor) for tensor in (query, key, value))
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


def _refuse_misfits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> None:
    """What torch refuses of every device, in its words."""
    if query.dtype is not key.dtype or query.dtype is not value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{cpp_type(query)} key.dtype: {cpp_type(key)} and value.dtype: {cpp_type(value)} instead."
        )
    if query.device != key.device or query.device != value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"scaled_dot_product_attention: query of {sizes(query)}, key of {sizes(key)} and value of "
            f"{sizes(value)}: query and key need rows of one length, key and value as many rows"
        )
    refuse_broadcast(query.shape[:-3], key.shape[:-3])
    refuse_broadcast(query.shape[:-3], value.shape[:-3])
    if mask is None:
        return
    if mask.dim() < 2:
        raise IndexError("Dimension out of range (expected to be in range of [-1, 0], but got -2)")
    if is_causal:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{cpp_type(mask)} and  query.dtype: {cpp_type(query)} instead."
        )


def _pad_head(tensor: torch.Tensor) -> torch.Tensor:
    """Head size rounded up to a multiple of 8."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 8))


def _prepare_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as the kernel takes it: added to the scores, aligned, expanded over batch and heads."""
    if mask.dtype is torch.bool:
        allowed = mask
        mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(allowed.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    if columns % _MASK_ALIGNMENT and columns > 1:
        mask = torch.nn.functional.pad(mask, (0, -columns % _MASK_ALIGNMENT))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def register_attention() -> torch.library.Library:
    """Put it instead of torch's composition; the library returned must be kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "PrivateUse1")
    return library
