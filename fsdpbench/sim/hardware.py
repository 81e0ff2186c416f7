"""Hardware profiles: everything the simulator knows about a machine, read from one TOML file.

A profile is a tree of frozen dataclasses whose fields carry the TOML file's own names, units included
(``bandwidth_gb_s``, ``launch_us``), so that a figure reads the same in the file, in the code and in a
report. Derived values in the simulator's units (bytes, FLOP/s) are properties of `HardwareProfile`.

Every file names its sources; figures that nobody measured are listed in its ``estimated``.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
DTYPES = ("bf16", "fp16", "tf32", "fp32")
_PROFILE_FOLDER = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A hardware profile that is unknown, unreadable or inconsistent; the message names file and key."""


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ProfileError(f"{key} = {value!r}: {rule}")


def _require_positive(owner: object, section: str, *keys: str) -> None:
    for key in keys:
        value = getattr(owner, key)
        _require(value > 0, f"{section}.{key}", value, "must be positive")


@dataclass(frozen=True)
class MemoryProfile:
    """Device memory. ``capacity_gib`` is what the driver reports as total memory.

    ``context_mib`` is what the CUDA context and libraries hold outside the caching allocator,
    ``nccl_mib_per_communicator`` what each NCCL communicator adds to it.
    """

    capacity_gib: float
    context_mib: float
    nccl_mib_per_communicator: float
    bandwidth_gb_s: float

    def __post_init__(self) -> None:
        _require_positive(self, "memory", "capacity_gib", "bandwidth_gb_s")
        _require(self.context_mib >= 0, "memory.context_mib", self.context_mib, "must not be negative")
        _require(
            self.context_mib * MIB < self.capacity_gib * GIB,
            "memory.context_mib",
            self.context_mib,
            "must be smaller than memory.capacity_gib",
        )


@dataclass(frozen=True)
class ComputeProfile:
    """Streaming multiprocessors and dense peak rates; ``peak_tflops`` has the keys bf16, fp16, tf32, fp32."""

    sm_count: int
    peak_tflops: Mapping[str, float]

    def __post_init__(self) -> None:
        _require_positive(self, "compute", "sm_count")
        for dtype in DTYPES:
            _require(
                dtype in self.peak_tflops, "compute.peak_tflops", dict(self.peak_tflops), f"lacks {dtype}"
            )
        for dtype, peak in self.peak_tflops.items():
            _require(
                dtype in DTYPES, f"compute.peak_tflops.{dtype}", peak, f"known types are {', '.join(DTYPES)}"
            )
            _require(peak > 0, f"compute.peak_tflops.{dtype}", peak, "must be positive")
