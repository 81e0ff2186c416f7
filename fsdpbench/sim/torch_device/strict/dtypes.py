"""Checks of mismatched dtypes, of integers if CUDA has kernels only for floats, and of scaled products.

The texts are those of torch's CPU kernels, which equal CUDA's if both have the same source. For scaled
products (`torch._scaled_mm`) they come from `ScaledBlas.cpp`; layouts follow the rule for fake tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from fsdpbench.base.files.documents import rows_beside, typed_rows
from fsdpbench.sim.torch_device.strict.words import (
    Arguments,
    cpp_type,
    error_text,
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
        raise RuntimeError(error_text("scaled.trailing", _by(a)))
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
        raise ValueError(error_text("scaled.kinds", of_a.dtype, of_b.dtype, a.dtype))
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
        raise ValueError(error_text("scaled.shapes", a.shape[0], b.shape[1], sizes(of_a), sizes(of_b)))


def _refuse_blocks(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> None:
    """Check for one scale per 32 elements (e8m0) or 16 (e4m3, only fp4), in tiles of 128 rows, 4 scales."""
    block = 16 if of_a.dtype is E4M3 else 32
    if block == 16 and a.dtype is not FP4:
        raise ValueError(f"Invalid scaling configuration: scales in float8_e4m3fn for {a.dtype}")
    summed = a.shape[1] * (2 if a.dtype is FP4 else 1)
    for name, rows, scales in (("scale_a", a.shape[0], of_a), ("scale_b", b.shape[1], of_b)):
        wanted = 128 * ceil(rows / 128) * 4 * ceil(ceil(summed / block) / 4)
        if scales.numel() != wanted:
            raise ValueError(error_text("scaled.blocks", name, wanted, scales.numel()))
        if not scales.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous")


def _by(matrix: torch.Tensor) -> str:
    return "x".join(map(str, matrix.shape))


Rule = Callable[[Arguments], None]
_HALVES = (torch.float16, torch.bfloat16)
# Error type that torch raises for booleans in `sub` and `relu`; since 2.14 a subclass of the earlier type.
_BOOLEAN_ERROR = NotImplementedError if torch.__version__ >= "2.14" else RuntimeError


def refuse_narrower(operator: Any, arguments: Arguments) -> None:
    """Raise `RuntimeError` for an in-place arithmetic operator whose result does not fit its target."""
    schema = operator._schema
    target, other = arguments.get("self"), arguments.get("other")
    if schema.name not in _IN_PLACE or not isinstance(target, torch.Tensor):
        return
    result = torch.result_type(target, other) if other is not None else target.dtype
    if schema.name == _DIVISION and arguments.get("rounding_mode") is None:
        inexact = result.is_floating_point or result.is_complex
        result = result if inexact else torch.get_default_dtype()
    if not torch.can_cast(result, target.dtype):
        raise RuntimeError(error_text("result_type", name_of(result), name_of(target.dtype)))


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


_FLOATS_ALONE = {
    row["operator"]: (row["kernel"], row["argument"]) for row in rows_beside(__file__, "only_floats.csv")
}
"""By operator: the name of CUDA's kernel in errors, and the argument that is checked."""


def _expect_type(reference: torch.Tensor, other: Any) -> None:
    if isinstance(other, torch.Tensor) and other.dtype is not reference.dtype:
        raise RuntimeError(f"expected scalar type {scalar_type(reference)} but found {scalar_type(other)}")


def _batch_norm(arguments: Arguments) -> None:
    """Require one dtype for parameters and statistics: the input's, or float32 with half precision."""
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
        if other.device != x.device or other.dtype is not x.dtype:
            type_of = cpp_type if other.device == x.device else legacy_type
            raise RuntimeError(error_text("input_types", type_of(x), name, type_of(other)))


def _index(arguments: Arguments) -> None:
    for index in arguments["indices"]:
        if isinstance(index, torch.Tensor) and (index.is_floating_point() or index.is_complex()):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")


def _minus(arguments: Arguments) -> None:
    for value in (arguments["self"], arguments["other"]):
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
            both = all(getattr(arguments[name], "dtype", None) is torch.bool for name in ("self", "other"))
            raise _BOOLEAN_ERROR(error_text("minus.two") if both else error_text("minus.one"))


@dataclass(frozen=True)
class _Row:
    """A row of `dtype_rules.csv`."""

    operators: tuple[str, ...]
    check: str
    argument: str
    other: str = ""
    error: str = "RuntimeError"
    text: str = ""

    def __call__(self, arguments: Arguments) -> None:
        a, b = arguments[self.argument], arguments.get(self.other)
        is_added = self.argument == "self" and "mat1" in arguments
        if _fits(self, a, b) or (is_added and a.dtype is arguments.get("out_dtype")):
            return
        words = {"a": scalar_type(a), "a_cpp": cpp_type(a), "a_legacy": legacy_type(a)}
        if isinstance(b, torch.Tensor):
            words |= {"b": scalar_type(b), "b_cpp": cpp_type(b)}
        raise _ERRORS[self.error](self.text.format(**words))


_ERRORS = {"RuntimeError": RuntimeError, "IndexError": IndexError, "boolean": _BOOLEAN_ERROR}


def _fits(row: _Row, a: torch.Tensor, b: Any) -> bool:
    """Return whether a call's arguments satisfy the rule."""
    if row.check == "same":
        return not isinstance(b, torch.Tensor) or a.dtype is b.dtype
    if row.check == "of":
        return str(a.dtype).removeprefix("torch.") in row.other.split()
    if row.check == "not_bool":
        return a.dtype is not torch.bool
    return a.is_floating_point() or (row.check == "inexact" and a.is_complex())


_FUNCTIONS: dict[str, Rule] = {
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2"), refuse_scaled_product),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"),
        _batch_norm,
    ),
    "convolution": _convolution,
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"), _index),
    **dict.fromkeys(("sub", "rsub"), _minus),
}
DTYPE_RULES: dict[str, list[Rule]] = {name: [rule] for name, rule in _FUNCTIONS.items()}
"""Rules by operator, in the order of the checks."""
for _row in typed_rows(__file__, "dtype_rules.csv", _Row):
    for _operator in _row.operators:
        DTYPE_RULES.setdefault(_operator, []).append(_row)
