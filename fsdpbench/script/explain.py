"""Errors that a script meets only because it is simulated, with the remedy."""

from __future__ import annotations

import re

from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE

_NAME = re.compile(rf"(\b|'){DEVICE_TYPE}(:\d+|')")
_PLACEHOLDER = (
    "a simulated tensor answers item() and float() with 0; guard the division, or take the number "
    "from what the script knows itself"
)
_HINTS: tuple[tuple[type[BaseException], str, str], ...] = (
    (ZeroDivisionError, "", _PLACEHOLDER),
    (ValueError, "math domain error", _PLACEHOLDER),
    (
        RuntimeError,
        "got mixed torch.Tensor and DTensor",
        "some parameters are sharded and some are not: wrap the model too, fully_shard(model)",
    ),
    (
        AssertionError,
        "not compiled with CUDA",
        "the script uses a part of torch.cuda that is not mapped to the simulated device; "
        "the traceback in stderr.log names it",
    ),
    (
        RuntimeError,
        "CUDA",
        "the script uses a part of CUDA that is not mapped to the simulated device; "
        "the traceback in stderr.log names it",
    ),
)
_WITHOUT_TRITON = (
    "kernels for the GPU are made only of what torch.compile hands to Inductor; AOTInductor and Inductor's "
    "own functions are not simulated: use torch.compile, or the eager program"
)
_CUDA_PACKAGES = ("flash_attn", "apex", "transformer_engine", "xformers", "bitsandbytes", "cupy")


_OF_TORCH = "in method wrapper_CUDA_"
"""Part of torch's own words for tensors of two devices."""


def name_cuda(error: BaseException) -> None:
    """Let an error that torch's C++ made call the device as the script does."""
    error.args = tuple(
        _NAME.sub(r"\1cuda\2", argument) if isinstance(argument, str) else argument for argument in error.args
    )


def explained(error: BaseException) -> str:
    """One line: the error, and what to do if its reason is the simulation."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    hint = _WITHOUT_TRITON if "TritonMissing" in told else _hint(error)
    return f"{told} ({hint})" if hint else told


def _hint(error: BaseException) -> str | None:
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if package in _CUDA_PACKAGES:
            return f"{package} runs code compiled for CUDA, which is not simulated; use torch's operators"
        return None
    for kind, words, hint in _HINTS:
        if type(error) is kind and words in str(error) and _OF_TORCH not in str(error):
            return hint
    return None
