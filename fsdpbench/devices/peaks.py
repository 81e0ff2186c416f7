"""Peak FLOP/s of GPUs, for MFU and HFU."""

from __future__ import annotations

from fsdpbench.sim.model.chips import chip_of


def peak_flops_of(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of the GPU that the driver calls `device_name` (`NVIDIA H200`); None if it is not known.

    `dtype` is `bf16`, `fp16`, `tf32`, `fp32`, `fp8` or `nvfp4`.
    """
    chip = chip_of(device_name)
    peak = None if chip is None else chip.peak_tflops.get(dtype)
    return None if peak is None else peak * 1e12
