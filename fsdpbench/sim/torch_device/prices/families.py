"""The table of prices: one row for each family of operators.

An operator is one of: only geometry (free), a matrix product or convolution, attention, or limited by memory.
Operators without a row are priced by their bytes as well, and reported as unknown, never silently free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.torch_device.prices.libraries import OF_LIBRARIES
from fsdpbench.sim.torch_device.prices.memory import (
    bags_added,
    bags_read,
    chosen_entries,
    copied_rows_filled,
    copied_rows_written,
    each_dimension,
    elementwise,
    moves,
    reduction,
    rows_added,
    rows_filled,
    rows_read,
    rows_written,
    whole_output,
)
from fsdpbench.sim.torch_device.prices.products import (
    FREE,
    Call,
    OperatorCost,
    Price,
    attention_backward,
    attention_forward,
    convolution,
    convolution_backward,
    grouped,
    operator_name,
    product,
    scaled,
)


class Family(NamedTuple):
    """Operators, by name without namespace and overload, with one price rule."""

    name: str
    price: Price
    operators: tuple[str, ...]


class Pattern(NamedTuple):
    """Operators recognised by a property, in order, after the names."""

    name: str
    price: Price
    matches: Callable[[Any, str], bool]


# fmt: off
FAMILIES = (
    Family("only geometry", lambda call, costs: FREE, (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift",
        "lift_fresh", "set_", "resize_", "resize_as_", "_reshape_alias", "record_stream", "_unsafe_view",
        "empty_permuted", "_efficientzerotensor", "is_pinned", "squeeze_", "unsqueeze_", "t_", "transpose_",
        "as_strided_", "swapaxes_", "swapdims_", "detach_",
    )),
    Family("matrix products", product(0), ("mm", "bmm")),
    Family("scaled products", scaled, ("_scaled_mm", "_scaled_mm_v2")),
    Family("products of groups", grouped, ("_grouped_mm",)),
    Family("matrix products that are added", product(1), (
        "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "_addmm_activation",
    )),
    Family("convolutions", convolution, ("convolution", "convolution_overrideable")),
    Family("gradients of convolutions", convolution_backward, (
        "convolution_backward", "convolution_backward_overrideable",
    )),
    Family("flash attention", attention_forward(4), ("_scaled_dot_product_flash_attention",)),
    Family("attention with a bias", attention_forward(6, bias_at=3), (
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    )),
    Family("flash attention, backward", attention_backward(11), (
        "_scaled_dot_product_flash_attention_backward",
    )),
    Family("attention with a bias, backward", attention_backward(11, bias_at=4), (
        "_scaled_dot_product_efficient_attention_backward",
    )),
    Family("rows that are looked up", moves("gather", rows_read), (
        "embedding", "index_select", "index", "gather", "take",
    )),
    Family("gradients of look-ups", moves("gather", rows_added), (
        "embedding_dense_backward", "index_select_backward",
    )),
    Family("bags of rows", moves("gather", bags_read), ("_embedding_bag", "_embedding_bag_forward_only")),
    Family("gradients of bags", moves("gather", bags_added), (
        "_embedding_bag_backward", "_embedding_bag_dense_backward",
    )),
    Family("rows written in place", moves("gather", rows_written), (
        "index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "put_",
        "scatter_reduce_",
    )),
    Family("rows filled with a number", moves("gather", rows_filled), ("index_fill_",)),
    Family("rows written into a copy", moves("gather", copied_rows_written), (
        "index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "put",
    )),
    Family("rows filled in a copy", moves("gather", copied_rows_filled), ("index_fill",)),
    Family("losses of classification", moves("gather", chosen_entries), (
        "nll_loss_forward", "nll_loss2d_forward",
    )),
    Family("their gradients", moves("gather", whole_output), ("nll_loss_backward", "nll_loss2d_backward")),
    Family("copies", moves("copy"), (
        "copy_", "_copy_from", "clone", "_to_copy", "cat", "stack", "_chunk_cat", "split_with_sizes_copy",
        "fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
        "new_ones", "new_full", "repeat", "constant_pad_nd", "slice_scatter", "select_scatter",
        "as_strided_scatter", "flip", "roll", "triu", "tril", "triu_", "tril_", "eye", "arange", "linspace",
        "expand_copy", "view_copy", "_foreach_copy_", "_foreach_zero_", "select_backward", "slice_backward",
        "as_strided_copy", "permute_copy", "t_copy", "transpose_copy", "split_copy", "masked_fill",
        "masked_fill_", "scalar_tensor", "diagonal_backward", "unfold_backward", "repeat_interleave",
        "tril_indices", "triu_indices", "constant_pad_nd_backward", "contiguous", "resize_as",
        "unsafe_split", "diag_embed", "diagonal_copy", "unfold_copy", "alias_copy", "detach_copy",
        "select_copy", "slice_copy", "squeeze_copy", "unsqueeze_copy", "unbind_copy", "block_diag", "rot90",
        "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "reflection_pad1d", "reflection_pad2d",
        "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
        "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
        "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
        "diagonal_scatter", "fill", "narrow_copy", "logspace", "masked_scatter",
    )),
    Family("reductions to some dimensions", reduction("reduction"), (
        "sum", "mean", "amax", "amin", "prod", "norm", "linalg_vector_norm", "nansum", "any", "all",
    )),
    Family("reductions", moves("reduction"), (
        "topk", "multinomial", "max", "min", "var", "var_mean", "std", "std_mean", "argmax", "argmin",
        "cumsum", "cumsum_", "cumprod", "logsumexp", "_softmax", "_log_softmax", "_softmax_backward_data",
        "_log_softmax_backward_data", "native_layer_norm", "native_group_norm", "native_batch_norm",
        "_native_batch_norm_legit", "_fused_rms_norm", "count_nonzero",
        "native_batch_norm_backward", "_foreach_norm", "_foreach_max", "mse_loss", "aminmax",
        "_foreach_powsum", "bincount", "cudnn_batch_norm", "_batch_norm_with_update", "batch_norm_backward",
        "batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_backward_reduce",
        "_ctc_loss", "_ctc_loss_backward", "avg_pool2d", "max_pool2d_with_indices", "adaptive_avg_pool2d",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "max_pool2d_with_indices_backward",
        "avg_pool2d_backward", "dist", "trace", "dot", "mv", "addmv", "histc", "_weight_norm_interface",
        "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "logcumsumexp", "glu",
        "glu_backward", "cummax", "cummin", "avg_pool3d", "avg_pool3d_backward", "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
        "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "multi_margin_loss",
        "multilabel_margin_loss_forward", "soft_margin_loss", "_linalg_check_errors",
        "nvfp4_amax", "_safe_softmax", "vdot", "renorm", "adaptive_max_pool3d",
    )),
    Family("sorting, and what selects by digits", moves("reduction", passes=4), (
        "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "mode",
    )),
    Family("Fourier transforms", moves("reduction", each_dimension), ("_fft_r2c", "_fft_c2r", "_fft_c2c")),
    Family("gradients of norms", moves("reduction", reread=True), (
        "native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward",
    )),
    Family("an element at a time", moves("pointwise"), (
        "upsample_nearest2d_backward", "upsample_bilinear2d_backward", "im2col", "col2im",
        "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "bernoulli", "bernoulli_",
        "normal_", "uniform_", "random_", "exponential_", "randn", "rand", "randint", "randperm",
        "randn_like", "rand_like", "randint_like", "normal", "native_dropout", "native_dropout_backward",
        "_fused_dropout", "mse_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward",
        "isin", "trunc_normal_", "log_normal_", "geometric_", "cauchy_", "dropout", "_conj_physical",
        "polar", "complex", "view_as_real_copy", "outer", "ger", "searchsorted", "bucketize",
        "upsample_nearest2d", "upsample_bilinear2d", "smooth_l1_loss", "smooth_l1_loss_backward",
        "huber_loss", "huber_loss_backward", "linalg_cross", "_euclidean_dist",
        "binary_cross_entropy_with_logits", "cross", "log_sigmoid_forward", "log_sigmoid_backward",
        "batch_norm_elemt", "batch_norm_backward_elemt", "floor_divide", "_thnn_fused_gru_cell",
        "_thnn_fused_gru_cell_backward", "dequantise_4bit", "mxfp8_rows", "mxfp8_columns",
        "nvfp4_both", "nvfp4_weight", "addr", "_prelu_kernel", "_prelu_kernel_backward",
        "rrelu_with_noise", "rrelu_with_noise_backward", "poisson", "soft_margin_loss_backward",
        "upsample_nearest1d", "upsample_nearest3d", "upsample_linear1d", "upsample_bicubic2d",
        "upsample_trilinear3d", "upsample_nearest1d_backward", "upsample_nearest3d_backward",
        "upsample_linear1d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward",
        "grid_sampler_2d", "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward",
        "rsub", "hardswish", "max_unpool2d", "max_unpool3d", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa",
    )),
)
_ACTIVATIONS = {
    "gelu", "silu", "sigmoid", "tanh", "threshold", "elu", "leaky_relu", "hardswish", "hardsigmoid",
    "softplus", "mish", "hardtanh", "log_sigmoid", "hardshrink", "softshrink", "logit", "native_dropout",
}
# fmt: on


def _is_activations_gradient(func: Any, name: str) -> bool:
    return name.endswith("_backward") and name.removesuffix("_backward") in _ACTIVATIONS


PATTERNS = (
    Pattern(
        "fused optimizers",
        moves("optimizer"),
        lambda func, name: name.startswith(("_fused_ad", "_fused_sgd")),
    ),
    Pattern("lists of tensors", moves("pointwise"), lambda func, name: name.startswith("_foreach_")),
    Pattern(
        "tagged pointwise by torch",
        elementwise("pointwise"),
        lambda func, name: torch.Tag.pointwise in func.tags,
    ),
    Pattern("gradients of activations", moves("pointwise"), _is_activations_gradient),
)
UNKNOWN = moves("pointwise", unknown=True)


_KERNELS = "triton::"
_BY_NAME: dict[str, Price] = {name: family.price for family in FAMILIES for name in family.operators}
_OF_USERS: dict[str, Price] = {}


def price(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, costs: KernelCosts
) -> OperatorCost:
    """Return the cost of a call `func(*args, **kwargs)` on meta tensors that returned `out`; never raises."""
    outs = [
        item for item in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(item, torch.Tensor)
    ]
    call = Call(func, args, kwargs, outs)
    own = _OF_USERS.get(func._schema.name)
    return own(call, costs) if own is not None else rule_of(func)(call, costs)


def price_of_kernel(name: str, arguments: Mapping[str, object], costs: KernelCosts) -> OperatorCost:
    """Return the cost of a launch of the Triton kernel `name`; `arguments` by name, tensors on meta."""
    operator = SimpleNamespace(_schema=SimpleNamespace(name=f"{_KERNELS}{name}"))
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    rule = _OF_USERS.get(operator._schema.name) or OF_LIBRARIES.get(operator._schema.name, UNKNOWN)
    return rule(Call(operator, tensors, dict(arguments), ()), costs)


def has_own_price(func: Any) -> bool:
    """Return whether a user has set this operator's price, by whatever rule."""
    return func._schema.name in _OF_USERS


def rule_of(func: Any) -> Price:
    """Return the rule of an operator's family."""
    name = operator_name(func)
    found = OF_LIBRARIES.get(func._schema.name) or _BY_NAME.get(name)
    if found is not None:
        return found
    return next((pattern.price for pattern in PATTERNS if pattern.matches(func, name)), UNKNOWN)


def operator_price(name: Any) -> Callable[[Price], Price]:
    """Let the decorated function price the operator `name` (`namespace::operator`), before the table's rule.

    `name` may be a Triton kernel, or `triton::` and its function's name. The `Call` of a kernel has its
    tensors as `args`, and tensors and numbers by name as `kwargs`; its results are unknown.

        from fsdpbench.sim.torch_device.prices import OperatorCost, operator_price, tensor_bytes
        @operator_price("mylib::fused_norm")
        def fused_norm(call, costs):
            duration = costs.memory_bound_ns(3 * tensor_bytes(call.outs[0]), "reduction")
            return OperatorCost("fused_norm_kernel", duration)

    It is called once for each distinct call with a `Call` (meta tensors: shapes, strides, dtypes) and the
    device's `KernelCosts`, and returns an `OperatorCost`. On real devices nothing calls it.

    Raises `ValueError` if `name` has no namespace, or has a price of a user's already.
    """
    if not isinstance(name, str):
        while not isinstance(getattr(name, "__name__", None), str) and hasattr(name, "fn"):
            name = name.fn  # what tunes a kernel
        name = f"{_KERNELS}{getattr(name, '__name__', '')}"
    namespace, separator, operator = name.partition("::")
    if not (namespace and separator and operator):
        raise ValueError(
            f"operator_price({name!r}): write namespace::operator, for example mylib::fused_norm"
        )
    if name in _OF_USERS:
        raise ValueError(f"operator_price({name!r}): this operator has a price already")

    def register(function: Price) -> Price:
        _OF_USERS[name] = function
        return function

    return register
