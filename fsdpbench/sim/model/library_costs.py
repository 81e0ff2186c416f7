"""Library kernels from measured tables: the models of `kernel_costs`, times a factor that depends on shape.

All functions take arrays, because a fit prices hundreds of shapes at a time.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdpbench.sim.model.sections import AttentionTable, FactorGrid, ProductTable

_QUERY_BLOCK = 128
_ELEMENT_BYTES = 2


def attention_seconds(
    table: AttentionTable, sm_count: int, memory_bandwidth: float, *shape: "Array", slowed: float = 1.0
) -> "Array":
    """Return seconds of causal forwards in 16 bits. `slowed`: the share of the rate reached in training.

    `shape`: batches, heads, heads of keys, lengths and head sizes.
    """
    model = attention_model_seconds(table, sm_count, memory_bandwidth, *shape, slowed=slowed)
    return model * factors_at(table.factors, *grid_coordinates(*shape))


def grid_coordinates(
    batch: "Array", heads: "Array", kv_heads: "Array", length: "Array", head_dim: "Array"
) -> "tuple[Array, Array, Array, Array]":
    """Return `AttentionTable.factors` coordinates: `batch` x `heads`, `length`, heads per key, size."""
    return batch * heads, length, heads / kv_heads, head_dim


def attention_model_seconds(
    table: AttentionTable,
    sm_count: int,
    memory_bandwidth: float,
    batch: "Array",
    heads: "Array",
    kv_heads: "Array",
    length: "Array",
    head_dim: "Array",
    *,
    slowed: float = 1.0,
) -> "Array":
    """Return `attention_seconds` without the factors of `table`, which are fitted to its residuals."""
    flops = 2.0 * batch * heads * length * length * head_dim
    rate = table.forward_tflops * 1e12 * slowed * np.where(head_dim <= 64, table.head_dim_64, 1.0)
    rows = 2 * (heads + kv_heads) * length
    traffic = batch * rows * head_dim * _ELEMENT_BYTES / (memory_bandwidth * table.memory_efficiency)
    blocks = np.ceil(length / _QUERY_BLOCK) * batch * heads
    even = blocks / sm_count
    share = table.wave_quantisation
    rounds = np.maximum(1.0, even * (1 - share) + np.ceil(even) * share) / even
    seconds: Array = table.floor_us * 1e-6 + flops / rate * rounds + traffic
    return seconds


Array = npt.NDArray[np.float64]


def node_weights(axes: Sequence[Sequence[float]], *coordinates: Array) -> Array:
    """Return each node's weight at each point, shape (points, nodes); rows sum to 1, last axis fastest."""
    weights = np.ones((len(coordinates[0]), 1))
    for axis, values in zip(axes, coordinates, strict=True):
        along = _along(np.log2(np.asarray(axis, dtype=float)), np.log2(values))
        weights = (weights[:, :, None] * along[:, None, :]).reshape(len(values), -1)
    return weights


def factors_at(grid: FactorGrid, *coordinates: Array) -> Array:
    """Return the factor at each point, interpolated in logarithms."""
    return np.exp(node_weights(grid.axes, *coordinates) @ np.log(np.asarray(grid.factors)))


def _along(nodes: Array, values: Array) -> Array:
    weights = np.zeros((len(values), len(nodes)))
    rows = np.arange(len(values))
    if len(nodes) == 1:
        weights[:, 0] = 1.0
        return weights
    inside = np.clip(values, nodes[0], nodes[-1])
    low = np.clip(np.searchsorted(nodes, inside, side="right") - 1, 0, len(nodes) - 2)
    share = (inside - nodes[low]) / (nodes[low + 1] - nodes[low])
    weights[rows, low] = 1 - share
    weights[rows, low + 1] = share
    return weights


_SPLITS = (1, 2, 3, 4, 8)
_SMALLEST_SPLIT_K = 256
_SPLIT_BYTES = 4
_OUTPUT_BYTES = 2
# Read in 16 bits, written in 8 bits.
_QUANTISE_BYTES = 3
_JOIN = 4.0
_MIB = 1 << 20


def product_seconds(
    table: ProductTable, sm_count: int, memory_bandwidth: float, *shape: Array, slowed: float = 1.0
) -> Array:
    """Return seconds of products `m x k` by `k x n`. `slowed`: the share of the rate reached in training.

    `shape`: m, n and k.
    """
    model = product_model_seconds(table, sm_count, memory_bandwidth, *shape, slowed=slowed)
    return model * factors_at(table.factors, *shape)


def product_model_seconds(
    table: ProductTable,
    sm_count: int,
    memory_bandwidth: float,
    m: Array,
    n: Array,
    k: Array,
    *,
    slowed: float = 1.0,
) -> Array:
    """Return `product_seconds` without the factors of `table`, which are fitted to this model's residuals.

    It adds two effects to `GemmCost`: the first factor may be quantised first (fp8 of some libraries), and
    operands stay in the second-level cache between calls, as in a measurement loop:
        bandwidth = (1 + (cache_gain - 1) * share) * memory bandwidth,   share = 1 / (1 + (bytes / cache)^2)
    """
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
    """Return seconds with the fastest tile and split."""
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
