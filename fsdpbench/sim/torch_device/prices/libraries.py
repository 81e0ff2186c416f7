"""Prices of kernels and operators of libraries that training programs use, by their full names.

Kernels of Triton are `triton::` and the function's name. Their bytes are those of their arguments: a kernel
reads its inputs and writes its results once, both of which are arguments.
"""

from __future__ import annotations

from functools import partial

import torch

from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.flops import compute_type
from fsdpbench.sim.torch_device.prices.memory import moves
from fsdpbench.sim.torch_device.prices.products import (
    Call,
    OperatorCost,
    Price,
    attention_backward,
    attention_forward,
)
from fsdpbench.sim.torch_device.strict.words import bind


def _flash(call: Call, costs: KernelCosts, *, backward: bool) -> OperatorCost:
    """Price flash-attn's operators.

    Their tensors are of (batch, length, heads, size), or packed ones of (tokens, heads, size), whose
    sequences are taken as equally long.
    """
    given = bind(call.func, call.args, call.kwargs)
    query, key = given["q"], given["k"]
    if query.dim() == 3:
        batch = given["cu_seqlens_q"].shape[0] - 1
        lengths = query.shape[0] // batch, key.shape[0] // batch
    else:
        batch, lengths = query.shape[0], (query.shape[1], key.shape[1])
    dtype = compute_type(query.dtype)
    price = costs.attention_backward_ns if backward else costs.attention_forward_ns
    shape = batch, query.shape[-2], *lengths, query.shape[-1]
    duration = price(*shape, bool(given["causal"]), dtype, key.shape[-2])
    duration = round(duration / costs.profile.attention.flash_share)
    return OperatorCost(f"flash_{'bwd' if backward else 'fwd'}_kernel_{dtype}", duration)


def _four_bits(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price bitsandbytes' product with a weight of 4 bits: the weight is expanded, then multiplied."""
    given = bind(call.func, call.args, call.kwargs)
    a, n = given["A"], call.outs[0].shape[-1]
    m, k, dtype = a.numel() // a.shape[-1], a.shape[-1], compute_type(a.dtype)
    duration = costs.gemm_ns(m, n, k, 1, dtype) + costs.memory_bound_ns(n * k // 2, "pointwise")
    return OperatorCost(f"gemm_4bit_{m}x{n}x{k}", duration)


def _eight_bits(call: Call, costs: KernelCosts) -> OperatorCost:
    """Price bitsandbytes' product of int8 as one of bf16, whose rate every profile has."""
    a, b = call.args[0], call.args[1]
    m, k, n = a.numel() // a.shape[-1], a.shape[-1], b.shape[0]
    return OperatorCost(f"gemm_int8_{m}x{n}x{k}", costs.gemm_ns(m, n, k, 1, compute_type(torch.bfloat16)))


def _flex(call: Call, costs: KernelCosts, *, backward: bool) -> OperatorCost:
    """Price FlexAttention: by the share of the scores that the mask leaves."""
    query, key, value = call.args[:3]
    dtype = compute_type(query.dtype)
    rule = attention_backward if backward else attention_forward
    args = (query, query, key, value) if backward else (query, key, value)
    costs = KernelCosts(costs.profile.with_attention("flex"))
    dense = rule(call._replace(args=args, kwargs={}), costs, causal_at=99)
    duration = round(dense.duration_ns * call.args[-1])
    name = f"triton_flex_{'bwd' if backward else 'fwd'}_{dtype}"
    return OperatorCost(name, duration, dense.workspace_bytes)


_RULES = {"elementwise": moves("pointwise"), "rows": moves("reduction"), "optimizers": moves("optimizer")}
_FLASH = ("", "_varlen")
OF_LIBRARIES: dict[str, Price] = {
    **{
        name: _RULES[kind]
        for kind, names in table_beside(__file__, "libraries.toml").items()
        for name in names
    },
    **dict.fromkeys(("bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"), _four_bits),
    **dict.fromkeys(("bitsandbytes::int8_linear_matmul", "bitsandbytes::int8_scaled_mm"), _eight_bits),
    "fsdpbench::flex_attention": partial(_flex, backward=False),
    "fsdpbench::flex_attention_backward": partial(_flex, backward=True),
    **{f"flash_attn::_flash_attn{kind}_forward": partial(_flash, backward=False) for kind in _FLASH},
    **{f"flash_attn::_flash_attn{kind}_backward": partial(_flash, backward=True) for kind in _FLASH},
}
