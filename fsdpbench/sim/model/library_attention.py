"""Attention forward by a library's table: the model of `attention.py` times a factor on the shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdpbench.sim.model.library_sections import AttentionTable, FactorGrid

_QUERY_BLOCK = 128
_ELEMENT_BYTES = 2


def attention_seconds(
    table: AttentionTable,
    sm_count: int,
    memory_bandwidth: float,
    batch: Array,
    heads: Array,
    kv_heads: Array,
    length: Array,
    head_dim: Array,
    slowed: float = 1.0,
) -> Array:
    """Seconds of each causal forward in 16 bits; ``slowed`` is the share of the rate that training leaves."""
    model = model_seconds(table, sm_count, memory_bandwidth, batch, heads, kv_heads, length, head_dim, slowed)
    return model * factors_at(table.factors, *grid_coordinates(batch, heads, kv_heads, length, head_dim))


def grid_coordinates(
    batch: Array, heads: Array, kv_heads: Array, length: Array, head_dim: Array
) -> tuple[Array, Array, Array, Array]:
    """Where a shape is in the grid of factors."""
    return batch * heads, length, heads / kv_heads, head_dim


def model_seconds(
    table: AttentionTable,
    sm_count: int,
    memory_bandwidth: float,
    batch: Array,
    heads: Array,
    kv_heads: Array,
    length: Array,
    head_dim: Array,
    slowed: float = 1.0,
) -> Array:
    """The same without the factors, which are fitted to what this leaves."""
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
    """Weight of every node, one row a point; rows add up to 1. The last axis runs fastest."""
    weights = np.ones((len(coordinates[0]), 1))
    for axis, values in zip(axes, coordinates, strict=True):
        along = _along(np.log2(np.asarray(axis, dtype=float)), np.log2(values))
        weights = (weights[:, :, None] * along[:, None, :]).reshape(len(values), -1)
    return weights


def factors_at(grid: FactorGrid, *coordinates: Array) -> Array:
    """The factor at each point."""
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
