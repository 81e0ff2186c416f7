"""Which operators are read with their shapes: those whose FLOPs or bytes follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from fsdpbench.reports.trace.arguments import CalledArguments
from fsdpbench.reports.trace.model import OperatorCall
from fsdpbench.reports.trace.text.raw import ABSENT

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_int_mm")
SCALED_PRODUCTS = ("_scaled_mm", "_scaled_mm_v2")
"""Of matrices in 8 or 4 bits; the second is `torch.nn.functional.scaled_mm`."""
CONVOLUTIONS = ("convolution", "convolution_backward")
ATTENTION = tuple(
    f"_scaled_dot_product_{how}_attention{way}"
    for how in ("flash", "efficient", "cudnn")
    for way in ("", "_backward")
)
GROUPED = "_grouped_mm"
REDUCTIONS = ("sum", "mean", "amax", "linalg_vector_norm")
"""Read what comes in; what they write is small."""
PASSES = (
    *("add", "add_", "sub", "mul", "mul_", "div", "div_", "copy_", "neg", "pow", "rsqrt", "exp", "sqrt"),
    *("gelu", "gelu_backward", "silu", "silu_", "silu_backward", "relu", "relu_", "threshold_backward"),
    *("tanh", "tanh_backward", "sigmoid", "sigmoid_backward", "clamp", "clamp_min", "where", "masked_fill_"),
    *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "native_batch_norm"),
    *("_fused_rms_norm_backward", "clone", "_to_copy"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_dropout", "native_dropout_backward", "lerp_", "addcmul_", "addcdiv_", "fill_", "zero_"),
)
"""One pass over memory: read what comes in, write as much as the largest of it."""

SHAPED = frozenset(
    f"aten::{name}"
    for name in (*PRODUCTS, *SCALED_PRODUCTS, GROUPED, *CONVOLUTIONS, *ATTENTION, *REDUCTIONS, *PASSES)
)

_MOST_INPUTS = 64
_MOST_SIZES = 16
_LARGEST = 1 << 48


def is_shaped(name: str) -> bool:
    """Whether an operator is read with its shapes; Inductor's kernels state what they move."""
    return name in SHAPED or name.startswith("triton_")


def call_of(arguments: CalledArguments) -> OperatorCall:
    """The call, of plain and bounded values; without sizes where the file tells none that could be."""
    texts = (arguments.sizes, arguments.types, arguments.values, arguments.strides)
    sizes, types, values, strides = map(_decoded, texts)
    count = len(sizes) if len(sizes) <= _MOST_INPUTS else 0
    gigabytes = arguments.gigabytes
    moved = round(gigabytes * 1e9) if gigabytes and 0 < gigabytes < _LARGEST / 1e9 else None
    shapes, steps = (tuple(map(_shape, each[:count])) for each in (sizes, strides))
    return OperatorCall(shapes, _texts(types, count), _texts(values, count), steps, moved)


def _decoded(text: Raw) -> list[Any]:
    """A list; empty where there is none."""
    found = msgspec.json.decode(text) if text != ABSENT else None
    return found if isinstance(found, list) else []


def _shape(value: Any) -> tuple[int, ...]:
    """Sizes of one tensor; of a list of tensors, and of anything else, nothing."""
    if not isinstance(value, list) or len(value) > _MOST_SIZES:
        return ()
    if any(type(size) is not int or not 0 <= size <= _LARGEST for size in value):
        return ()
    return tuple(value)


def _texts(values: Sequence[Any], count: int) -> tuple[str, ...]:
    found = [each[:80] if isinstance(each, str) else "" for each in values[:count]]
    return (*found, *[""] * (count - len(found)))
