"""Scaled products (`torch._scaled_mm`): dtypes, layouts, sizes and scales as CUDA takes them.

The words are those of torch's kernel (`ScaledBlas.cpp`) and, for layouts, of its rule for CUDA's fake
tensors.
"""

from __future__ import annotations

from math import ceil

import torch

from fsdpbench.sim.torch_device.strict.words import Arguments, sizes

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
_WIDE = (torch.bfloat16, torch.float16, torch.float32)


def refuse_scaled_product(arguments: Arguments) -> None:
    """Raise what CUDA raises for a scaled product of these operands."""
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
    """Which scaling this is, by dtypes and sizes of the scales; blocks of 128 x 128 are not told further."""
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
    """A scale for 32 elements (e8m0) or 16 (e4m3, fp4 alone), in tiles of 128 rows and 4 scales."""
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
