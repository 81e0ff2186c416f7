"""Prices of one profile's library tables, shape by shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from fsdpbench.sim.costs.grid import Array
from fsdpbench.sim.costs.library_attention import attention_seconds
from fsdpbench.sim.costs.library_products import product_seconds
from fsdpbench.sim.hardware.library_sections import AttentionTable, ProductTable
from fsdpbench.sim.hardware.profile import HardwareProfile


class LibraryCosts:
    """Seconds of products and attention by the first of ``names`` that knows them; None if none does."""

    def __init__(self, profile: HardwareProfile, names: Sequence[str]) -> None:
        self._profile = profile
        self._tables = [profile.libraries[name] for name in names if name in profile.libraries]

    def product_table(self, dtype: str) -> ProductTable | None:
        """The table of a type; 16-bit types share one."""
        kind = "bf16" if dtype == "fp16" else dtype
        return next((tables.products[kind] for tables in self._tables if kind in tables.products), None)

    @property
    def attention_table(self) -> AttentionTable | None:
        """The first table of attention."""
        return next((tables.attention for tables in self._tables if tables.attention is not None), None)

    def product(
        self, m: int, n: int, k: int, dtype: str, slowed: float = 1.0, comes_quantised: bool = False
    ) -> float | None:
        """One product; ``slowed`` is the share of the tensor cores' rate that training leaves.
        ``comes_quantised``: without what libraries cast before it, in operators that were measured as one."""
        table, profile = self.product_table(dtype), self._profile
        if table is None:
            return None
        if comes_quantised:
            table = dataclasses.replace(table, quantise=0.0)
        a, b, c = map(_array, (m, n, k))
        return float(product_seconds(table, profile.sm_count, profile.memory_bandwidth, a, b, c, slowed)[0])

    def attention_forward(
        self, batch: int, heads: int, kv_heads: int, length: int, head_dim: int, slowed: float = 1.0
    ) -> float | None:
        """One causal forward of equal lengths."""
        table, profile = self.attention_table, self._profile
        if table is None:
            return None
        seconds = attention_seconds(
            table,
            profile.sm_count,
            profile.memory_bandwidth,
            _array(batch),
            _array(heads),
            _array(kv_heads),
            _array(length),
            _array(head_dim),
            slowed,
        )
        return float(seconds[0])


def _array(value: int) -> Array:
    return np.array([float(value)])
