"""What a chip could do at most: the peak that operators are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdpbench.reports.trace import Trace

ANY_CHIP = ""
"""Instead of a device's name: this chip, whatever the trace says."""

_COMPUTE_TYPES = {
    "bfloat16": "bf16",
    "half": "fp16",
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float4_e2m1fn_x2": "nvfp4",
}


@dataclass(frozen=True)
class Chip:
    """name: of the hardware profile that says so.  peak_flops: dense FLOP/s by compute type (bf16, fp16,
    tf32, fp32, ...).  memory_bandwidth: bytes per second."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float

    def least_s(self, flops: float | None, size: float | None, compute_type: str | None) -> float | None:
        """The seconds that so many FLOPs and bytes of memory take at the peak; None where neither is known.

        Without a peak for the type only the bytes count, and without bytes only the FLOPs.
        """
        peak = self.peak_flops.get(compute_type or "")
        times = [flops / peak] if flops and peak else []
        times += [size / self.memory_bandwidth] if size else []
        return max(times, default=None)


def chip_of(trace: Trace, known: Mapping[str, Chip]) -> Chip | None:
    """The chip known for any device, else by the trace's own label, else by its first device's name."""
    if ANY_CHIP in known:
        return known[ANY_CHIP]
    hardware = (trace.simulated or {}).get("hardware")
    names = [hardware.get("name")] if isinstance(hardware, Mapping) else []
    names += [device.get("name") for device in trace.devices]
    return next((known[name] for name in names if isinstance(name, str) and name in known), None)


def compute_type(input_type: str, kernel: str) -> str | None:
    """In which type a product is computed, from that of its inputs and its kernel's name."""
    found = _COMPUTE_TYPES.get(input_type.lower().removeprefix("c10::"))
    if found == "fp32" and ("tf32" in kernel.lower() or "s1688" in kernel):
        return "tf32"
    return found
