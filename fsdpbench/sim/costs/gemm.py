"""Dense matrix products: time by shape.

The library cuts the ``m x n`` output into tiles and gives them to the multiprocessors, one each at a time:

    tiles    = ceil(m / rows) * ceil(n / columns) * batch * split
    waves    = tiles / multiprocessors, between even sharing and full rounds (``wave_quantisation``)
    compute  = waves * 2 * rows * columns * (k / split + prologue_k) / (rate of one multiprocessor)
    traffic  = bytes of both inputs and the output / bandwidth
    time     = floor + (compute^p + traffic^p)^(1/p)

A tile of 256 x 128 runs its main loop fastest, smaller ones waste less of a matrix's edge and of the last
round; a *split* of k makes more tiles of a small output at the price of adding up partial results. The
library's choice is modelled as the fastest of them. ``prologue_k`` is what starting and ending a tile
costs, in steps of k. The power p = 4 joins the two limits smoothly, for memory and compute never overlap
perfectly where they are equal.

Fitted for each GPU on 160 measured shapes (bf16, m 1 to 16384); the errors are in the profiles.
"""

from __future__ import annotations

import math

from fsdpbench.sim.hardware.profile import HardwareProfile

BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
_SPLITS = (1, 2, 3, 4, 8)
# A split is not worth its start-up below so many steps of k.
_SMALLEST_SPLIT_K = 256
# Partial results are written and read back in fp32, half of it from cache.
_SPLIT_BYTES = 4
_JOIN = 4.0


class GemmCost:
    """Seconds of a matrix product from its shape."""

    def __init__(self, profile: HardwareProfile) -> None:
        self._curve = profile.gemm
        self._sm_count = profile.sm_count
        self._peak = profile.peak_flops
        self._bandwidth = profile.memory_bandwidth * profile.gemm.memory_efficiency

    def seconds(self, m: int, n: int, k: int, batch: int, dtype: str, kind: str) -> float:
        """Duration of ``batch`` products ``m x k`` by ``k x n``; ``kind`` forward or weight_grad."""
        curve = self._curve
        rate = self._peak[dtype] * curve.sustained * curve.under_load
        if kind == "weight_grad":
            rate *= curve.weight_grad
        compute = math.inf
        for rows, columns, efficiency in curve.tiles:
            tile_rate = rate / self._sm_count * efficiency
            tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
            for split in _SPLITS:
                if split > 1 and k < split * _SMALLEST_SPLIT_K:
                    break
                seconds = self._waves(tiles * split) * 2 * rows * columns * (k / split + curve.prologue_k)
                seconds /= tile_rate
                if split > 1:
                    seconds += batch * m * n * _SPLIT_BYTES * split / self._bandwidth
                compute = min(compute, seconds)
        traffic = batch * BYTES_PER_ELEMENT[dtype] * (m * k + k * n + m * n) / self._bandwidth
        return (compute**_JOIN + traffic**_JOIN) ** (1 / _JOIN) + curve.floor_us * 1e-6

    def _waves(self, tiles: int) -> float:
        """Rounds over the multiprocessors; the library recovers a part of the loss in the last round."""
        even = tiles / self._sm_count
        share = self._curve.wave_quantisation
        return max(1.0, even * (1 - share) + math.ceil(even) * share)
