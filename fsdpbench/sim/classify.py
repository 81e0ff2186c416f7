"""From an operator call to its cost: which model prices it, and with which shape or bytes.

An operator is one of: *free* (only geometry), a matrix product or convolution, attention, or limited by
memory. The last are priced by the bytes that they must read and write. An operator that is in none of the
lists below is priced by its bytes too, and reported as unknown, never silently free.

Everything here sees meta tensors: shapes, strides and dtypes. It runs once a distinct call (see `plans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fsdpbench.configuration.compute_type import compute_type
from fsdpbench.sim.costs import KernelCosts
from fsdpbench.sim.tensors import tensors_in

Call = tuple[Sequence[Any], dict[str, Any], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class OperatorCost:
    """Price of one call: kernel name, nanoseconds, scratch memory in bytes, and whether it is a guess."""

    kernel: str
    duration_ns: int
    workspace_bytes: tuple[int, ...] = ()
    unknown: bool = False


FREE = OperatorCost("", 0)

_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift",
    "lift_fresh", "set_", "resize_", "resize_as_", "_reshape_alias", "record_stream", "_unsafe_view",
    "empty_permuted", "_efficientzerotensor", "is_pinned",
}  # fmt: skip
_COPIES = {
    "copy_", "_copy_from", "clone", "_to_copy", "cat", "stack", "_chunk_cat", "split_with_sizes_copy",
    "fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
    "new_ones", "new_full", "repeat", "constant_pad_nd", "slice_scatter", "select_scatter",
    "as_strided_scatter", "flip", "roll", "triu", "tril", "triu_", "tril_", "eye", "arange", "linspace",
    "expand_copy", "view_copy", "_foreach_copy_", "_foreach_zero_", "select_backward", "slice_backward",
    "as_strided_copy", "permute_copy", "t_copy", "transpose_copy", "split_copy", "masked_fill",
    "masked_fill_", "scalar_tensor", "diagonal_backward", "unfold_backward", "repeat_interleave",
    "tril_indices", "triu_indices", "constant_pad_nd_backward", "contiguous", "resize_as", "unsafe_split",
}  # fmt: skip
_REDUCTIONS = {
    "topk", "multinomial",
    "sum", "mean", "amax", "amin", "max", "min", "prod", "norm", "linalg_vector_norm", "var", "var_mean",
    "std", "std_mean", "argmax", "argmin", "any", "all", "cumsum", "cumsum_", "cumprod", "logsumexp",
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
    "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm", "nansum",
    "count_nonzero", "native_batch_norm_backward", "_foreach_norm", "_foreach_max", "mse_loss", "aminmax",
    "_foreach_powsum", "bincount", "cudnn_batch_norm", "_batch_norm_with_update", "batch_norm_backward",
    "batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_backward_reduce", "_ctc_loss",
    "_ctc_loss_backward",
    "avg_pool2d", "max_pool2d_with_indices", "adaptive_avg_pool2d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward", "dist",
    "trace", "dot", "mv", "addmv", "histc", "_weight_norm_interface",
    "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "logcumsumexp", "glu", "glu_backward",
}  # fmt: skip
_POINTWISE = {
    "upsample_nearest2d_backward", "upsample_bilinear2d_backward", "im2col", "col2im",
    "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
    "bernoulli", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "randn", "rand", "randint",
    "randperm", "randn_like", "rand_like", "randint_like", "normal", "native_dropout",
    "native_dropout_backward", "_fused_dropout", "mse_loss_backward", "binary_cross_entropy",
    "binary_cross_entropy_backward", "isin", "trunc_normal_", "log_normal_", "geometric_", "cauchy_",
    "dropout", "_conj_physical", "polar", "complex", "view_as_real_copy", "outer", "ger", "searchsorted",
    "bucketize", "upsample_nearest2d", "upsample_bilinear2d", "smooth_l1_loss", "smooth_l1_loss_backward",
    "huber_loss", "huber_loss_backward", "linalg_cross", "_euclidean_dist",
    "binary_cross_entropy_with_logits", "cross", "log_sigmoid_forward", "log_sigmoid_backward",
    "batch_norm_elemt", "batch_norm_backward_elemt", "_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward",
}  # fmt: skip
# Two passes over inputs that do not fit the caches between them: one for the data's gradient, one for the
# weight's.
_TWO_PASS_BACKWARD = {
    "native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward",
}  # fmt: skip


def price(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, costs: KernelCosts
) -> OperatorCost:
    """Cost of a call that ran on meta tensors and returned ``out``. Never raises for an unknown operator."""
    name = func._schema.name.split("::", 1)[1]
    if name in _FREE:
        return FREE
    outs = [
        item for item in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(item, torch.Tensor)
    ]
    shaped = _SHAPED.get(name)
    if shaped is not None:
        return shaped((args, kwargs, outs), costs)
    kind = "memcpy" if _is_plain_copy(name, args, outs) else _kind(func, name)
    sized = _SIZED.get(name)
    nbytes = sized((args, kwargs, outs)) if sized is not None else _moved(func, args, kwargs, outs)
    if sized is not None and kind is None:
        kind = "gather"
    if name in _TWO_PASS_BACKWARD:
        nbytes += sum(map(tensor_bytes, tensors_in(args[:2], {})))
    duration = costs.memory_bound_ns(nbytes, kind or "pointwise")
    return OperatorCost(name.strip("_") + "_kernel", duration, unknown=kind is None)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's distinct elements occupy: expanded (stride 0) dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            elements *= size
    return elements * tensor.element_size()


def _kind(func: Any, name: str) -> str | None:
    """Kind of a memory-bound operator, None if it is unknown."""
    if name in _COPIES:
        return "copy"
    if name in _REDUCTIONS or name in _TWO_PASS_BACKWARD:
        return "reduction"
    if name.startswith(("_fused_ad", "_fused_sgd")):
        return "optimizer"
    if name in _POINTWISE or name.startswith("_foreach_") or torch.Tag.pointwise in func.tags:
        return "pointwise"
    if name.endswith("_backward") and name.removesuffix("_backward") in _ACTIVATIONS:
        return "pointwise"
    return None


def _is_plain_copy(name: str, args: Sequence[Any], outs: Sequence[torch.Tensor]) -> bool:
    """Whether torch leaves a copy to the driver: one dtype, both sides contiguous."""
    if name not in ("clone", "copy_", "_copy_from"):
        return False
    sides = [*tensors_in(args, {}), *outs][:2] if name == "clone" else tensors_in(args, {})[:2]
    return (
        len(sides) == 2
        and sides[0].dtype is sides[1].dtype
        and sides[0].shape == sides[1].shape
        and all(side.is_contiguous() for side in sides)
    )


_ACTIVATIONS = {
    "gelu", "silu", "sigmoid", "tanh", "threshold", "elu", "leaky_relu", "hardswish", "hardsigmoid",
    "softplus", "mish", "hardtanh", "log_sigmoid", "hardshrink", "softshrink", "logit", "native_dropout",
}  # fmt: skip


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[torch.Tensor]) -> int:
    """Bytes read and written: all inputs, all outputs, and the inputs that the schema says are written."""
    inputs = tensors_in(args, kwargs)
    known = {id(tensor) for tensor in inputs}
    total = sum(map(tensor_bytes, inputs)) + sum(tensor_bytes(out) for out in outs if id(out) not in known)
    arguments = func._schema.arguments
    for index, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written = tensors_in((value,), {})
        size = sum(map(tensor_bytes, written))
        total += size if not _only_written(func, argument.name) else 0
    return total


_WRITE_ONLY = {
    "copy_",
    "_copy_from",
    "fill_",
    "zero_",
    "_foreach_copy_",
    "_foreach_zero_",
    "normal_",
    "uniform_",
    "random_",
}


def _only_written(func: Any, argument: str) -> bool:
    """Whether an output argument is written without being read (counted once then)."""
    return argument == "out" or func._schema.name.split("::", 1)[1] in _WRITE_ONLY


# ------------------------------------------------------------------------------------- matrix products


def _gemm(a: torch.Tensor, b: torch.Tensor, costs: KernelCosts) -> OperatorCost:
    """``a`` (..., m, k) times ``b`` (..., k, n)."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = prod(a.shape[:-2])
    dtype = compute_type(a.dtype)
    kind = "weight_grad" if _is_weight_gradient(a, b) else "forward"
    if not (m and n and k and batch):
        return OperatorCost(f"gemm_{dtype}", costs.memory_bound_ns(0))
    return OperatorCost(
        f"gemm_{dtype}_{batch}x{m}x{n}x{k}" if batch > 1 else f"gemm_{dtype}_{m}x{n}x{k}",
        costs.gemm_ns(m, n, k, batch, dtype, kind),
    )


def _is_weight_gradient(a: torch.Tensor, b: torch.Tensor) -> bool:
    """``grad.t() @ input``: a linear layer's only product whose first factor alone is stored transposed."""
    if a.dim() != 2 or min(a.shape) < 2 or min(b.shape) < 2:
        return False
    return a.stride(0) == 1 and a.stride(1) != 1 and b.stride(1) == 1


def _product(first: int) -> Callable[[Call, KernelCosts], OperatorCost]:
    """A matrix product whose factors are arguments ``first`` and ``first + 1``."""
    return lambda call, costs: _gemm(call[0][first], call[0][first + 1], costs)


def _convolution_gemm(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, groups: int
) -> tuple[int, int, int]:
    """The implicit product (m, n, k) of one group."""
    return y.shape[0] * prod(y.shape[2:]), weight.shape[0] // groups, prod(weight.shape[1:])


def _convolution(call: Call, costs: KernelCosts) -> OperatorCost:
    args, kwargs, outs = call
    groups = _argument(args, kwargs, 8, "groups", 1)
    x, weight = args[0], args[1]
    if _argument(args, kwargs, 6, "transposed", False):
        m, n, k = x.shape[0] * prod(x.shape[2:]), prod(weight.shape[1:]), weight.shape[0] // groups
    else:
        m, n, k = _convolution_gemm(x, weight, outs[0], groups)
    dtype = compute_type(x.dtype, convolution=True)
    return OperatorCost(f"conv_fprop_{dtype}_{groups}x{m}x{n}x{k}", costs.gemm_ns(m, n, k, groups, dtype))


def _convolution_backward(call: Call, costs: KernelCosts) -> OperatorCost:
    args, kwargs, _ = call
    grad, x, weight = args[0], args[1], args[2]
    groups = _argument(args, kwargs, 9, "groups", 1)
    wants_input, wants_weight, wants_bias = _argument(args, kwargs, 10, "output_mask", (True, True, True))
    m, n, k = _convolution_gemm(x, weight, grad, groups)
    dtype = compute_type(x.dtype, convolution=True)
    duration = costs.gemm_ns(m, k, n, groups, dtype) if wants_input else 0
    duration += costs.gemm_ns(n, k, m, groups, dtype, "weight_grad") if wants_weight else 0
    duration += costs.memory_bound_ns(tensor_bytes(grad), "reduction") if wants_bias else 0
    return OperatorCost(f"conv_bprop_{dtype}_{groups}x{m}x{n}x{k}", duration)


# ------------------------------------------------------------------------------------------- attention


def _attention_shape(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int, int, int, int]:
    """(batch, heads, query length, key length, head size) of (batch, heads, length, size) tensors."""
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.shape[3]


def _bias_ns(args: Sequence[Any], bias_at: int | None, costs: KernelCosts) -> int:
    """Reading what is added to the scores, where the kernel takes such a thing."""
    bias = args[bias_at] if bias_at is not None and bias_at < len(args) else None
    return costs.memory_bound_ns(tensor_bytes(bias)) if isinstance(bias, torch.Tensor) else 0


def _attention_forward(
    causal_at: int, bias_at: int | None = None
) -> Callable[[Call, KernelCosts], OperatorCost]:
    def cost(call: Call, costs: KernelCosts) -> OperatorCost:
        args, kwargs, _ = call
        causal = bool(_argument(args, kwargs, causal_at, "is_causal", False))
        dtype = compute_type(args[0].dtype)
        shape, kv_heads = _attention_shape(args[0], args[1]), args[1].shape[1]
        duration = costs.attention_forward_ns(*shape, causal, dtype, kv_heads)
        return OperatorCost(f"flash_fwd_kernel_{dtype}", duration + _bias_ns(args, bias_at, costs))

    return cost


def _attention_backward(
    causal_at: int, bias_at: int | None = None
) -> Callable[[Call, KernelCosts], OperatorCost]:
    def cost(call: Call, costs: KernelCosts) -> OperatorCost:
        args, kwargs, _ = call
        query, key = args[1], args[2]
        causal = bool(_argument(args, kwargs, causal_at, "is_causal", False))
        dtype = compute_type(query.dtype)
        shape = _attention_shape(query, key)
        duration = costs.attention_backward_ns(*shape, causal, dtype, key.shape[1])
        duration += _bias_ns(args, bias_at, costs)
        return OperatorCost(f"flash_bwd_kernel_{dtype}", duration, _backward_workspace(query, key))

    return cost


def _backward_workspace(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    """Scratch of flash attention's backward: row sums, the gradient of the queries in float32 (lengths
    rounded to 128, head size to 32), and expanded key and value gradients with grouped queries."""
    batch, heads, length, kv_length, size = _attention_shape(query, key)
    rounded = -(-length // 128) * 128
    wide = -(-size // 32) * 32 if size <= 192 else 256
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * wide * 4]
    if key.shape[1] != heads:
        sizes += [batch * heads * kv_length * size * query.element_size()] * 2
    return tuple(sizes)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    """An argument given by position or by name."""
    if index < len(args):
        return args[index]
    return kwargs.get(name, default)


_SHAPED: dict[str, Callable[[Call, KernelCosts], OperatorCost]] = {
    "mm": _product(0),
    "bmm": _product(0),
    "addmm": _product(1),
    "addmm_": _product(1),
    "baddbmm": _product(1),
    "baddbmm_": _product(1),
    "addbmm": _product(1),
    "_addmm_activation": _product(1),
    "_scaled_mm": _product(0),
    "convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    "convolution_backward_overrideable": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention_forward(4),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "_scaled_dot_product_efficient_attention": _attention_forward(6, bias_at=3),
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(11, bias_at=4),
    "_scaled_dot_product_cudnn_attention": _attention_forward(6, bias_at=3),
}


# ------------------------------------------------------------- memory-bound, but not by all of their inputs


def _rows_read(call: Call) -> int:
    """A look-up reads as many rows as it writes, and its indices."""
    args, _, outs = call
    return 2 * sum(map(tensor_bytes, outs)) + sum(
        tensor_bytes(tensor) for tensor in tensors_in(args, {})[1:] if not tensor.is_floating_point()
    )


def _rows_added(call: Call) -> int:
    """A dense gradient of a look-up: zeroed once, and for each row a read of it and of what is added."""
    args, _, outs = call
    return sum(map(tensor_bytes, outs)) + 3 * tensor_bytes(args[0])


def _bags_read(call: Call) -> int:
    """Bags of rows read and summed: a row an index, and the sums."""
    args, _, outs = call
    table, indices = args[0], args[1]
    return indices.numel() * table.shape[-1] * table.element_size() + sum(map(tensor_bytes, outs))


def _bags_added(call: Call) -> int:
    """The gradient of a table (zeroed once): for each index a row of the bag's gradient is read and added."""
    args, _, outs = call
    grad, indices = args[0], args[1]
    return 3 * indices.numel() * grad.shape[-1] * grad.element_size() + sum(map(tensor_bytes, outs))


def _rows_written(call: Call) -> int:
    """Writing rows in place: the values are read, their places read and written."""
    args, _, _ = call
    tensors = tensors_in(args, {})[1:]
    return 3 * max((tensor_bytes(t) for t in tensors if t.is_floating_point()), default=0) + sum(
        tensor_bytes(t) for t in tensors if not t.is_floating_point()
    )


def _chosen_entries(call: Call) -> int:
    """The loss of a classification reads one entry a row."""
    args, _, outs = call
    return 2 * tensor_bytes(args[1]) + sum(map(tensor_bytes, outs))


def _whole_output(call: Call) -> int:
    """The output is zeroed, and a few entries are written."""
    return sum(map(tensor_bytes, call[2]))


_SIZED: dict[str, Callable[[Call], int]] = {
    "embedding": _rows_read,
    "_embedding_bag": _bags_read,
    "_embedding_bag_forward_only": _bags_read,
    "_embedding_bag_backward": _bags_added,
    "_embedding_bag_dense_backward": _bags_added,
    "index_select": _rows_read,
    "index": _rows_read,
    "gather": _rows_read,
    "take": _rows_read,
    "embedding_dense_backward": _rows_added,
    "index_select_backward": _rows_added,
    "index_put_": _rows_written,
    "_index_put_impl_": _rows_written,
    "index_add_": _rows_written,
    "index_copy_": _rows_written,
    "scatter_": _rows_written,
    "scatter_add_": _rows_written,
    "scatter_add": _rows_written,
    "scatter": _rows_written,
    "nll_loss_forward": _chosen_entries,
    "nll_loss_backward": _whole_output,
    "nll_loss2d_forward": _chosen_entries,
    "nll_loss2d_backward": _whole_output,
}
