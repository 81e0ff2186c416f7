"""What data sheets say of the chips that operator tables name; everything else is fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Multiprocessors, memory bandwidth (bytes/s), second-level cache, dense peaks by type.

    ``family`` chips share what a library does: it chooses kernels by architecture. ``switch_from``: from so
    many GPUs the measured NCCL reduces in the NVLink switch (0: never seen).
    """

    profile: str
    family: str
    sm_count: int
    memory_bandwidth: float
    cache_mib: float
    peak_tflops: Mapping[str, float]
    switch_from: int = 0


def _peaks(bf16: float, fp8: float | None = None, nvfp4: float | None = None) -> dict[str, float]:
    given = {"bf16": bf16, "fp8": fp8, "nvfp4": nvfp4}
    return {kind: value for kind, value in given.items() if value is not None}


# NVIDIA's data sheets, dense rates. The switch: README of the measured tables.
CHIPS: Mapping[str, Chip] = {
    "a100": Chip("a100-80gb", "ampere", 108, 2.039e12, 40, _peaks(312)),
    "h100": Chip("h100-80gb", "hopper", 132, 3.352e12, 50, _peaks(989, 1979)),
    "h200": Chip("h200", "hopper", 132, 4.8e12, 50, _peaks(989, 1979), switch_from=5),
    "b200": Chip("b200", "blackwell", 148, 8e12, 126, _peaks(2250, 4500, 9000), switch_from=6),
    "b300": Chip("b300", "blackwell", 148, 8e12, 126, _peaks(2250, 4500, 13500)),
    "gb200": Chip("gb200", "blackwell", 152, 8e12, 126, _peaks(2500, 5000, 10000)),
    "gb300": Chip("gb300", "blackwell", 152, 8e12, 126, _peaks(2500, 5000, 15000)),
    "l40s": Chip("l40s", "ada", 142, 8.64e11, 96, _peaks(362, 733)),
    "rtx-pro-6000": Chip(
        "rtx-pro-6000", "blackwell-workstation", 188, 1.597e12, 128, _peaks(504, 1007, 2015)
    ),
}
