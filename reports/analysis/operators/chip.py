"""What a chip could do at most: the peak that operators are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def roof(self, flops: float | None, size: float | None, kind: str) -> tuple[float | None, str | None]:
        """The ns that so many FLOPs of a type and bytes of memory take at the peak, and which of them bind;
        None where that is not known."""
        peak = self.peak_flops.get(kind)
        if (flops is not None and peak is None) or not (flops or size):
            return None, None
        computing, moving = (flops or 0) / (peak or 1), (size or 0) / self.memory_bandwidth
        return max(computing, moving) * 1e9, "compute" if computing >= moving else "memory"


def chip_of(trace: Trace, known: Mapping[str, Chip]) -> Chip | None:
    """The chip known for any device, else the one that the trace's own label describes, else that known by
    the label's name or by the first device's."""
    if ANY_CHIP in known:
        return known[ANY_CHIP]
    hardware = (trace.simulated or {}).get("hardware")
    label = hardware if isinstance(hardware, Mapping) else {}
    names = [label.get("name"), *(device.get("name") for device in trace.devices)]
    by_name = (known[name] for name in names if isinstance(name, str) and name in known)
    return described(label) or next(by_name, None)


def described(hardware: Mapping[str, Any]) -> Chip | None:
    """The chip that a description of hardware tells the peaks of; None where it tells none."""
    try:
        peaks = {str(kind): float(peak) for kind, peak in hardware["peak_flops"].items()}
        found = Chip(str(hardware["name"])[:200], peaks, float(hardware["memory_bytes_per_s"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return found if all(0 < rate < 1e30 for rate in (*peaks.values(), found.memory_bandwidth)) else None


def compute_type(input_type: str, kernel: str) -> str | None:
    """In which type a product is computed, from that of its inputs and its kernel's name."""
    found = _COMPUTE_TYPES.get(input_type.lower().removeprefix("c10::"))
    if found == "fp32" and ("tf32" in kernel.lower() or "s1688" in kernel):
        return "tf32"
    return found
