"""Attention forward by a library's table: the model of `attention.py` times a factor on the shape."""

from __future__ import annotations

import numpy as np

from fsdpbench.sim.costs.grid import Array, factors_at
from fsdpbench.sim.hardware.library_sections import AttentionTable

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
