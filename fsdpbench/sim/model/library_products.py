"""Matrix products by a library's table: the tile model times a factor on (m, n, k).

Two more effects than there: a factor that is quantised first (fp8 of some libraries), and operands that
stay in the second-level cache from one call to the next, as they do in a measured loop:

    bandwidth = (1 + (cache_gain - 1) * share) * memory bandwidth,   share = 1 / (1 + (bytes / cache)^2)

Written on arrays, for the fit prices hundreds of shapes at the same time.
"""

from __future__ import annotations

import numpy as np

from fsdpbench.sim.model.library_attention import Array, factors_at
from fsdpbench.sim.model.library_sections import ProductTable

_SPLITS = (1, 2, 3, 4, 8)
_SMALLEST_SPLIT_K = 256
_SPLIT_BYTES = 4
_OUTPUT_BYTES = 2
# Read in 16 bits, written in 8.
_QUANTISE_BYTES = 3
_JOIN = 4.0
_MIB = 1 << 20


def product_seconds(
    table: ProductTable,
    sm_count: int,
    memory_bandwidth: float,
    m: Array,
    n: Array,
    k: Array,
    slowed: float = 1.0,
) -> Array:
    """Seconds of each product; ``slowed`` is the share of the tensor cores' rate that training leaves."""
    model = model_seconds(table, sm_count, memory_bandwidth, m, n, k, slowed)
    return model * factors_at(table.factors, m, n, k)


def model_seconds(
    table: ProductTable,
    sm_count: int,
    memory_bandwidth: float,
    m: Array,
    n: Array,
    k: Array,
    slowed: float = 1.0,
) -> Array:
    """The same without the factors, which are fitted to what this leaves."""
    bandwidth = memory_bandwidth * table.memory_efficiency
    compute = _compute(table, sm_count, bandwidth, m, n, k, slowed)
    moved = table.operand_bytes * (m * k + k * n) + _OUTPUT_BYTES * m * n
    cached = 1 / (1 + (moved / (table.cache_mib * _MIB)) ** 2)
    traffic = moved / (bandwidth * (1 + (table.cache_gain - 1) * cached))
    before = table.quantise * _QUANTISE_BYTES * m * k / bandwidth
    joined: Array = (compute**_JOIN + traffic**_JOIN) ** (1 / _JOIN) + before + table.floor_us * 1e-6
    return joined


def _compute(
    table: ProductTable, sm_count: int, bandwidth: float, m: Array, n: Array, k: Array, slowed: float
) -> Array:
    """The fastest of the tiles and splits."""
    rate = table.peak_tflops * 1e12 * table.sustained * slowed / sm_count
    fastest = np.full(len(m), np.inf)
    for rows, columns, efficiency in table.tiles:
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        for split in _SPLITS:
            even = tiles * split / sm_count
            share = table.wave_quantisation
            waves = np.maximum(1.0, even * (1 - share) + np.ceil(even) * share)
            seconds = waves * 2 * rows * columns * (k / split + table.prologue_k) / (rate * efficiency)
            if split > 1:
                seconds = seconds + m * n * _SPLIT_BYTES * split / bandwidth
                seconds[k < split * _SMALLEST_SPLIT_K] = np.inf
            np.minimum(fastest, seconds, out=fastest)
    return fastest
