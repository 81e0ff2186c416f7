"""FLOPs and bytes of one operator's call, from its shapes.

A product of m x k and k x n is 2 m n k FLOPs; bytes are the least that must cross the memory: each input
read once, each output written once. What does not follow from the shapes is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdpbench.reports.trace import OperatorCall, dtype_bytes
from fsdpbench.reports.trace.shaped import (
    ATTENTION,
    CONVOLUTIONS,
    GROUPED,
    PASSES,
    PRODUCTS,
    REDUCTIONS,
    SCALED_PRODUCTS,
)

_IS_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Where "causal" stands among the inputs (native_functions.yaml)."""

_OUT_DTYPE = {"_scaled_mm": 6, "_scaled_mm_v2": 9}
_BYTES_OF = {"4": 8, "5": 2, "6": 4, "7": 8, "11": 1, "15": 2, "23": 1, "24": 1, "44": 1}
"""By type as torch numbers them: int64, float16, float32, float64, bool, bfloat16, and three of 8 bits."""

_MOST_FLOPS = 1 << 80
_MOST_ELEMENTS = 1 << 50
"""No call has more; shapes that say so are not believed."""


@dataclass(frozen=True)
class CallCost:
    """FLOPs and least bytes of a call; `dtype`: the profiler's name of the type of what is computed with."""

    flops: int | None
    bytes: int | None
    dtype: str


@lru_cache(maxsize=4096)
def cost_of(name: str, call: OperatorCall) -> CallCost:
    """Of an operator by its name (`aten::mm`)."""
    short = name.removeprefix("aten::")
    first = next((kind for size, kind in zip(call.sizes, call.types, strict=True) if size and kind), "")
    if call.moved is not None:
        return CallCost(None, call.moved, first)
    try:
        if short in _BY_TYPE:
            return CallCost(None, _one_pass(short, call), first)
        flops, elements = _RULES[short](short, call)
    except (IndexError, KeyError, ValueError):  # an operator, or shapes for it, that are not known
        flops, elements = None, None
    if (flops or 0) > _MOST_FLOPS or (elements or 0) > _MOST_ELEMENTS:
        flops, elements = None, None
    each = dtype_bytes(first or None)
    return CallCost(flops, None if elements is None or each is None else elements * each, first)


def _product(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """[b x] m x k times [b x] k x n, behind what is added to it."""
    left, right = call.sizes[1:3] if name in ("addmm", "baddbmm") else call.sizes[:2]
    (*batch, m, k), (*_, inner, n) = left, right
    if len(left) != len(right) or k != inner or len(left) not in (2, 3):
        return None, None
    many = prod(batch)
    return 2 * many * m * n * k, many * (m * k + k * n + m * n)


def _scaled_product(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """m x k times k x n of elements that take a byte; two numbers where they are of 4 bits."""
    flops, elements = _product(name, call)
    if flops is None or elements is None:
        return None, None
    (m, _), (_, n) = call.sizes[:2]
    each_of_out = _BYTES_OF.get(call.values[_OUT_DTYPE[name]], 1)
    packed = 2 if "float4" in call.types[0].lower() else 1
    return packed * flops, elements + (each_of_out - 1) * m * n


def _grouped_product(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """Rows of one matrix, or columns of the other, divided among groups; or a product of each group."""
    left, right = call.sizes[:2]
    (*groups, m, k), (*others, inner, n) = left, right
    if k != inner or len(groups) > 1 or len(others) > 1:
        return None, None
    many = groups[0] if groups and others else 1
    # Where the inner dimension is divided, each group has a result.
    results = many if groups or others else (call.sizes[2] or (1,))[0]
    return 2 * many * m * n * k, prod(left) + prod(right) + results * m * n


def _convolution(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    if name == "convolution_backward":
        result, image, weight = call.sizes[:3]
        wanted = call.values[-1].count("True") if call.values[-1] else 0
        if len(result) < 3 or len(result) != len(weight) or not wanted:
            return None, None
        # The gradient of the bias is no product.
        ways = min(wanted, 2)
        products = ways * 2 * prod(result) * prod(weight[1:])
        return products, prod(result) + 2 * (prod(image) + prod(weight))
    image, weight = call.sizes[:2]
    stride, padding, dilation = (_numbers(call.values[place]) for place in (3, 4, 5))
    if call.values[6] != "False" or len(image) < 3 or len(image) != len(weight):
        return None, None
    spatial = len(image) - 2
    if not (len(stride) == len(padding) == len(dilation) == spatial) or min(stride) < 1:
        return None, None
    moves = zip(image[2:], padding, dilation, weight[2:], stride, strict=True)
    spans = [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, pad, gap, kernel, step in moves]
    out = [image[0], weight[0], *spans]
    if min(out) < 1:
        return None, None
    return 2 * prod(out) * prod(weight[1:]), prod(image) + prod(weight) + prod(out)


def _attention(name: str, call: OperatorCall) -> tuple[int | None, int | None]:
    """Two products forward, five backward; half of each where the mask is causal."""
    backward = name.endswith("_backward")
    query, key, value = call.sizes[1:4] if backward else call.sizes[:3]
    if len(query) != 4 or len(key) != 4 or len(value) != 4:
        return None, None
    batch, heads, rows, width = query
    columns, value_width = key[2], value[3]
    causal = call.values[_IS_CAUSAL[name]] if _IS_CAUSAL[name] < len(call.values) else ""
    if causal not in ("True", "False"):
        return None, None
    widths = 3 * width + 2 * value_width if backward else width + value_width
    flops = 2 * batch * heads * rows * columns * widths
    out = batch * heads * rows * value_width
    moved = prod(query) + prod(key) + prod(value) + out
    if backward:  # read with the gradient of the output, three gradients written
        moved += out + prod(query) + prod(key) + prod(value)
    return flops // 2 if causal == "True" else flops, moved


def _one_pass(name: str, call: OperatorCall) -> int | None:
    """Bytes: each input read in its type, and as much written as the largest of them has. Of what is expanded
    (stride 0) each element is read once."""
    read, whole = [], []
    for place, size in enumerate(call.sizes):
        each = dtype_bytes(call.types[place] or None)
        if size and each is None:
            return None
        if size and each is not None:
            steps = call.strides[place] if place < len(call.strides) else size
            whole.append(prod(size) * each)
            read.append(prod(count for count, step in zip(size, steps, strict=False) if step) * each)
    if not whole or sum(whole) > _MOST_ELEMENTS:
        return None
    if name in ("fill_", "zero_"):
        return whole[0]
    if name == "_to_copy" and call.values[1]:
        return read[0] + prod(call.sizes[0]) * _BYTES_OF[call.values[1]]
    return (read[-1] if name == "copy_" else sum(read)) + (0 if name in REDUCTIONS else max(whole))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.strip("[] ").split(",") if word.strip())


_BY_TYPE = frozenset((*PASSES, *REDUCTIONS))
_RULES: dict[str, Callable[[str, OperatorCall], tuple[int | None, int | None]]] = {
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(SCALED_PRODUCTS, _scaled_product),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(ATTENTION, _attention),
    GROUPED: _grouped_product,
}
