"""The arithmetic of products in a dtype: those in float32 may be rounded to TF32, as torch's settings say."""

from __future__ import annotations

import torch

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float4_e2m1fn_x2: "nvfp4",
}


def compute_type(dtype: torch.dtype, convolution: bool = False) -> str:
    """`bf16`, `fp16`, `tf32`, `fp32`, `fp8` or `nvfp4`, for a matrix product or a convolution of this dtype.

    torch's defaults differ: a convolution in float32 uses TF32, a matrix product does not. The names that
    are asked here also tell what was set by the older ones (`allow_tf32`, `set_float32_matmul_precision`);
    the older ones raise an error where the newer ones were used.
    """
    name = _NAMES.get(dtype)
    if name is not None:
        return name
    backend = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return "tf32" if dtype is torch.float32 and backend.fp32_precision == "tf32" else "fp32"
