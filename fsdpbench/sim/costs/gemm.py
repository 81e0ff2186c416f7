"""Dense matrix products (first version)."""

from __future__ import annotations

import math

from fsdpbench.sim.hardware import HardwareProfile

_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}


class GemmCost:
    """Seconds of a matrix product from its shape."""

    def __init__(self, profile: HardwareProfile) -> None:
        self._curve = profile.gemm
        self._sm_count = profile.sm_count
        self._peak = profile.peak_flops
        self._bandwidth = profile.memory_bandwidth * profile.gemm.memory_efficiency

    def seconds(self, m: int, n: int, k: int, batch: int, dtype: str, kind: str) -> float:
        """The fastest tile's waves, the memory traffic, or the floor, whichever is longest."""
        curve = self._curve
        peak = self._peak[dtype] * curve.sustained
        per_sm = peak / self._sm_count
        compute = math.inf
        for rows, columns, efficiency in curve.tiles:
            tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
            waves = math.ceil(tiles / self._sm_count)
            compute = min(
                compute, waves * 2 * rows * columns * (k + curve.prologue_k) / (per_sm * efficiency)
            )
        if kind == "weight_grad":
            compute /= curve.weight_grad
        traffic = batch * _BYTES[dtype] * (m * k + k * n + m * n) / self._bandwidth
        return max(compute, traffic) + curve.floor_us * 1e-6
