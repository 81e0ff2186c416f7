"""Checks of dtypes that do not fit, integers where CUDA has kernels only for floats, and scaled products.

The texts are those of torch's CPU kernels, which are CUDA's where both are compiled from the same source; for
scaled products (`torch._scaled_mm`) of `ScaledBlas.cpp` and, for layouts, of the rule for CUDA's fake
tensors.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import torch

from fsdpbench.sim.torch_device.strict.words import (
    Arguments,
    cpp_type,
    legacy_type,
    name_of,
    scalar_type,
    sizes,
)

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
_WIDE = (torch.bfloat16, torch.float16, torch.float32)


def refuse_scaled_product(arguments: Arguments) -> None:
    """Raise CUDA's error for a scaled product of these operands."""
    a, b = arguments["self"], arguments["mat2"]
    if a.dim() != 2 or b.dim() != 2:
        raise RuntimeError(f"Inputs must be 2D but got self.dim()={a.dim()} and mat2.dim()={b.dim()}")
    for name, matrix in (("mat1", a), ("mat2", b)):
        if matrix.dtype not in (E4M3, E5M2, FP4):
            raise RuntimeError(f"Expected {name} to be Float8 or Float4_x2 matrix got {matrix.dtype}")
    if a.dtype is b.dtype is E5M2:
        raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
    if (a.dtype is FP4) != (b.dtype is FP4):
        raise RuntimeError(f"mat1 and mat2 must both be Float4_x2 or neither, got {a.dtype} and {b.dtype}")
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({_by(a)} and {_by(b)})")
    _refuse_layout(a, b)
    _refuse_result(arguments)
    if "scale_a" in arguments and isinstance(arguments["scale_a"], torch.Tensor):
        _refuse_scales(a, b, arguments["scale_a"], arguments["scale_b"], arguments["out_dtype"])


def _refuse_layout(a: torch.Tensor, b: torch.Tensor) -> None:
    if not (a.numel() and b.numel()):
        return
    if not (a.stride(1) == 1 and a.stride(0) > 1):
        raise RuntimeError(f"self must be row_major, got stride {a.stride()}")
    if not (b.stride(0) == 1 and b.stride(1) > 1):
        raise RuntimeError(f"mat2 must be col_major, got stride {b.stride()}")
    if a.shape[1] % 16:
        raise RuntimeError(
            f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({_by(a)})."
        )
    if b.shape[0] % 16 or b.shape[1] % 16:
        raise RuntimeError(f"mat2 shape ({_by(b)}) must be divisible by 16")


def _refuse_result(arguments: Arguments) -> None:
    out, bias, columns = arguments.get("out_dtype"), arguments.get("bias"), arguments["mat2"].shape[1]
    if out is not None and out not in (*_WIDE, E4M3, E5M2):
        raise RuntimeError(f"Only bf16, fp16, fp32 and fp8 results are supported, got {out}")
    if bias is None:
        return
    if out is torch.float32:
        raise RuntimeError("Bias is not supported when out_dtype is set to Float32")
    if bias.numel() != columns:
        raise RuntimeError(f"Bias must be size {columns} but got {bias.numel()}")
    if bias.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"Bias must be either Half or BFloat16, but got {bias.dtype}")


def _refuse_scales(
    a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor, out: torch.dtype | None
) -> None:
    """Check the scaling by dtypes and sizes of the scales; blocks of 128 x 128 are one kind."""
    if of_a.dtype is of_b.dtype is E8M0 or of_a.dtype is of_b.dtype is E4M3:
        _refuse_blocks(a, b, of_a, of_b)
        return
    if a.dtype is FP4 or of_a.dtype is not torch.float32 or of_b.dtype is not torch.float32:
        raise ValueError(
            f"Invalid scaling configuration: scales of {of_a.dtype} and {of_b.dtype} for {a.dtype}; float32 "
            "scales a tensor or its rows in fp8, float8_e8m0fnu and float8_e4m3fn blocks"
        )
    by_rows = tuple(of_a.shape) == (a.shape[0], 1) and tuple(of_b.shape) == (1, b.shape[1])
    if of_a.numel() == of_b.numel() == 1:
        return
    if by_rows:
        if out not in (None, torch.bfloat16):
            raise RuntimeError("Only bf16 high precision output types are supported for row-wise scaling.")
        if not (of_a.is_contiguous() and of_b.is_contiguous()):
            raise RuntimeError("Both scale_a and scale_b must be contiguous for rowwise scaling.")
        return
    if of_a.dim() != 2 or of_b.dim() != 2 or of_a.shape[1] != ceil(a.shape[1] / 128):
        raise ValueError(
            "Invalid scaling configuration. For tensorwise scaling, both scales should be scalar. For "
            f"rowwise scaling, scale_a should be ({a.shape[0]}, 1), scale_b should be (1, {b.shape[1]}). Got "
            f"scale_a.size()={sizes(of_a)} and scale_b.size()={sizes(of_b)}"
        )


def _refuse_blocks(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    """Check for a scale for 32 elements (e8m0) or 16 (e4m3, only fp4), in tiles of 128 rows and 4 scales."""
    block = 16 if of_a.dtype is E4M3 else 32
    if block == 16 and a.dtype is not FP4:
        raise ValueError(f"Invalid scaling configuration: scales in float8_e4m3fn for {a.dtype}")
    summed = a.shape[1] * (2 if a.dtype is FP4 else 1)
    for name, rows, scales in (("scale_a", a.shape[0], of_a), ("scale_b", b.shape[1], of_b)):
        wanted = 128 * ceil(rows / 128) * 4 * ceil(ceil(summed / block) / 4)
        if scales.numel() != wanted:
            raise ValueError(
                f"Invalid blockwise scaling configuration. {name} should have {wanted} elements, got "
                f"{scales.numel()}."
            )
        if not scales.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous")


def _by(matrix: torch.Tensor) -> str:
    return "x".join(map(str, matrix.shape))


Rule = Callable[[Arguments], None]
_HALVES = (torch.float16, torch.bfloat16)
_INDICES = (torch.int64, torch.int32)
# What torch raises for booleans in `sub` and `relu`: a subclass of before since 2.14.
_BOOLEAN_ERROR = NotImplementedError if torch.__version__ >= "2.14" else RuntimeError


def refuse_narrower(operator: Any, arguments: Arguments) -> None:
    """Raise RuntimeError for an arithmetic operator in place whose result does not fit its target."""
    schema = operator._schema
    target, other = arguments.get("self"), arguments.get("other")
    if schema.name not in _IN_PLACE or not isinstance(target, torch.Tensor):
        return
    result = torch.result_type(target, other) if other is not None else target.dtype
    if schema.name == _DIVISION and arguments.get("rounding_mode") is None and not _is_inexact(result):
        result = torch.get_default_dtype()
    if not torch.can_cast(result, target.dtype):
        raise RuntimeError(
            f"result type {name_of(result)} can't be cast to the desired output type {name_of(target.dtype)}"
        )


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


_DIVISION = "aten::div_"
_IN_PLACE = frozenset(("aten::add_", "aten::sub_", "aten::mul_", "aten::pow_", _DIVISION))


def refuse_integers(packet: str, arguments: Arguments) -> None:
    """Raise `NotImplementedError` for integers in a kernel that CUDA has only for floats."""
    found = _FLOATS_ALONE.get(packet)
    if found is None:
        return
    tensor = arguments.get(found[1])
    if isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
        raise NotImplementedError(f"\"{found[0]}\" not implemented for '{scalar_type(tensor)}'")


def _float_kernels() -> dict[str, tuple[str, str]]:
    """Read CUDA's kernels by their name in errors, and the deciding argument, of each operator."""
    with Path(__file__).with_name("float_kernels.csv").open(encoding="utf-8", newline="") as file:
        return {row["operator"]: (row["kernel"], row["argument"]) for row in csv.DictReader(file)}


_FLOATS_ALONE = _float_kernels()


def _product(first: str, second: str) -> Rule:
    def check(arguments: Arguments) -> None:
        a, b = arguments[first], arguments[second]
        if a.dtype is not b.dtype:
            raise RuntimeError(
                f"expected m1 and m2 to have the same dtype, but got: {cpp_type(a)} != {cpp_type(b)}"
            )

    return check


def _addmm(arguments: Arguments) -> None:
    for first, second in (("self", "mat2"), ("mat1", "mat2")):
        a, b = arguments[first], arguments[second]
        if a.dtype is not b.dtype:
            raise RuntimeError(
                f"{first} and {second} must have the same dtype, but got {scalar_type(a)} and "
                f"{scalar_type(b)}"
            )


def _dot(arguments: Arguments) -> None:
    """Check for equal types before floats."""
    a, b = arguments["self"], arguments["tensor" if "tensor" in arguments else "other"]
    if a.dtype is not b.dtype:
        raise RuntimeError(
            f"dot : expected both vectors to have same dtype, but found {scalar_type(a)} and {scalar_type(b)}"
        )


def _addbmm(arguments: Arguments) -> None:
    """Check as `addmm`, batch by batch."""
    _addmm({"self": arguments["self"], "mat1": arguments["batch1"], "mat2": arguments["batch2"]})


def _mv(arguments: Arguments) -> None:
    matrix, vector = arguments["self"], arguments["vec"]
    if matrix.dtype is not vector.dtype:
        names = ", ".join(map(scalar_type, (vector, matrix)))
        raise RuntimeError(
            f"addmv input tensors must have the same dtype, but got {names}, and {scalar_type(vector)}"
        )


def _like(first: str, *others: str) -> Rule:
    """Require the dtype of the first argument for all."""

    def check(arguments: Arguments) -> None:
        reference = arguments[first]
        for name in others:
            _expect_type(reference, arguments.get(name))

    return check


def _expect_type(reference: torch.Tensor, other: Any) -> None:
    if isinstance(other, torch.Tensor) and other.dtype is not reference.dtype:
        raise RuntimeError(f"expected scalar type {scalar_type(reference)} but found {scalar_type(other)}")


def _batch_norm(arguments: Arguments) -> None:
    """Require one dtype of parameters and statistics: the input's, or float32 for half precision."""
    tensors = [arguments.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    given = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    x = arguments["input"]
    if not given or not x.is_floating_point():
        return
    allowed = (x.dtype, torch.float32) if x.dtype in _HALVES else (x.dtype,)
    reference = given[0] if given[0].dtype in allowed else x
    for tensor in given:
        _expect_type(reference, tensor)


def _convolution(arguments: Arguments) -> None:
    x = arguments["input"]
    for name in ("weight", "bias"):
        other = arguments[name]
        if not isinstance(other, torch.Tensor):
            continue
        if other.device != x.device:
            raise RuntimeError(
                f"Input type ({legacy_type(x)}) and {name} type ({legacy_type(other)}) should be the same"
            )
        if other.dtype is not x.dtype:
            raise RuntimeError(
                f"Input type ({cpp_type(x)}) and {name} type ({cpp_type(other)}) should be the same"
            )


def _nll_loss(arguments: Arguments) -> None:
    target = arguments["target"]
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {scalar_type(target)}")
    _expect_type(arguments["self"], arguments.get("weight"))


def _binary_cross_entropy(arguments: Arguments) -> None:
    x = arguments["self"]
    for other in (arguments["target"], arguments.get("weight")):
        if isinstance(other, torch.Tensor) and other.dtype is not x.dtype:
            raise RuntimeError(f"Found dtype {scalar_type(other)} but expected {scalar_type(x)}")


def _index(arguments: Arguments) -> None:
    for index in arguments["indices"]:
        if isinstance(index, torch.Tensor) and (index.is_floating_point() or index.is_complex()):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")


def _embedding(arguments: Arguments) -> None:
    """Check the indices' dtype: torch's rule for shapes accepts any before 2.13."""
    indices = arguments["indices"]
    if indices.dtype not in _INDICES:
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; "
            f"but got {legacy_type(indices)} instead (while checking arguments for embedding)"
        )


def _index_select(arguments: Arguments) -> None:
    if arguments["index"].dtype not in _INDICES:
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")


def _index_add(arguments: Arguments) -> None:
    index, tensor, source = arguments["index"], arguments["self"], arguments["source"]
    if index.dtype not in _INDICES:
        raise RuntimeError(
            f"index_add_(): Expected dtype int32/int64 for index but got: {scalar_type(index)}"
        )
    if tensor.dtype is not source.dtype:
        raise RuntimeError(
            f"index_add_(): self ({scalar_type(tensor)}) and source ({scalar_type(source)}) must have the "
            "same scalar type"
        )


def _index_copy(arguments: Arguments) -> None:
    index, tensor, source = arguments["index"], arguments["self"], arguments["source"]
    if index.dtype is not torch.int64:
        raise RuntimeError(f"index_copy_(): Expected a long tensor for index, but got {scalar_type(index)}")
    if tensor.dtype is not source.dtype:
        raise RuntimeError(
            "index_copy_(): self and source expected to have the same dtype, but got (self) "
            f"{scalar_type(tensor)} and (source) {scalar_type(source)}"
        )


def _index_fill(arguments: Arguments) -> None:
    if arguments["index"].dtype is not torch.int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")


def _index_put(arguments: Arguments) -> None:
    _index(arguments)
    tensor, values = arguments["self"], arguments["values"]
    if values.dtype is not tensor.dtype:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, got "
            f"{scalar_type(tensor)} for the destination and {scalar_type(values)} for the source."
        )


def _minus(arguments: Arguments) -> None:
    for value in (arguments["self"], arguments["other"]):
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
            both = all(getattr(arguments[name], "dtype", None) is torch.bool for name in ("self", "other"))
            raise _BOOLEAN_ERROR(
                "Subtraction, the `-` operator, with two bool tensors is not supported. Use the `^` or "
                "`logical_xor()` operator instead."
                if both
                else "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying "
                "to invert a mask, use the `~` or `logical_not()` operator instead."
            )


def _close(arguments: Arguments) -> None:
    a, b = arguments["self"], arguments["other"]
    if a.dtype is not b.dtype:
        raise RuntimeError(f"{scalar_type(a)} did not match {scalar_type(b)}")


def _no_booleans(words: str, error: type[RuntimeError] = RuntimeError) -> Rule:
    def check(arguments: Arguments) -> None:
        if arguments["self"].dtype is torch.bool:
            raise error(words)

    return check


def _spread(arguments: Arguments) -> None:
    tensor = arguments["self"]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError("std and var only support floating point and complex dtypes")


def _multinomial(arguments: Arguments) -> None:
    if not arguments["self"].is_floating_point():
        raise RuntimeError(
            "multinomial only supports floating-point dtypes for input, got: "
            f"{scalar_type(arguments['self'])}"
        )


DTYPE_RULES: dict[str, Rule] = {
    "mm": _product("self", "mat2"),
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2"), refuse_scaled_product),
    "addmm": _addmm,
    "addbmm": _addbmm,
    "bmm": _like("self", "mat2"),
    "baddbmm": _like("batch1", "batch2"),
    "mv": _mv,
    "native_layer_norm": _like("input", "weight", "bias"),
    "native_group_norm": _like("input", "weight", "bias"),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"),
        _batch_norm,
    ),
    "convolution": _convolution,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    "binary_cross_entropy": _binary_cross_entropy,
    **dict.fromkeys(("dot", "vdot"), _dot),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "index_select": _index_select,
    "index_add": _index_add,
    "index_copy": _index_copy,
    "embedding": _embedding,
    "index_fill": _index_fill,
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), _index_put),
    **dict.fromkeys(("sub", "rsub"), _minus),
    "allclose": _close,
    "relu": _no_booleans("Boolean inputs not supported for relu", _BOOLEAN_ERROR),
    "argmax": _no_booleans("argmax(): does not support bool input"),
    "argmin": _no_booleans("argmin(): does not support bool input"),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _spread),
    "multinomial": _multinomial,
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), _like("input", "grid")),
    "linalg_cross": _like("self", "other"),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _like("grad_output", "output")),
}
