"""Peak FLOP/s of GPUs, for MFU and HFU: dense rates from the makers' datasheets."""

from __future__ import annotations

from collections.abc import Mapping

# TFLOPS without sparsity by words of the driver's device name; the first that fits counts, so special
# models come first. Sources: NVIDIA's datasheets of A100, H100, H200, L4, L40S, A10, V100 and DGX B200
# (2020 to 2024); of rates that they print with sparsity, half.
_PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "H200 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60},
    "H200": {"bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
    "H100 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60},
    "H100 PCIe": {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    "H100": {"bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
    "B200": {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "L40S": {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    "A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    "V100": {"fp16": 125, "fp32": 15.7},
}


def peak_flops_of(device_name: str, dtype: str) -> float | None:
    """FLOP/s of the GPU that the driver calls `device_name` (`NVIDIA H200`); None if it is not in the table.

    `dtype` is `bf16`, `fp16`, `tf32` or `fp32`. `A10G`, a slower relative of the A10, is not in it.
    """
    words = device_name.replace("-", " ").split()
    for name, peaks in _PEAK_TFLOPS.items():
        if all(part in words for part in name.split()):
            peak = peaks.get(dtype)
            return None if peak is None else peak * 1e12
    return None
