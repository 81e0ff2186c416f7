"""The products with weights of a model's blocks, by name: what adapters are put beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

ATTENTION_LAYERS = frozenset({"query", "key", "value", "query_key_value", "output", "qkv", "proj"})
"""Names of those of attention."""


@dataclass(frozen=True)
class Product:
    """A product with weights: `name` of the layer in its block, and how wide its input and output are."""

    name: str
    inputs: int
    outputs: int


@runtime_checkable
class HasProducts(Protocol):
    """A workload of one stack of blocks that names the linear layers of each."""

    @property
    def block_count(self) -> int:
        """Blocks of the stack."""

    def products(self, layer: int) -> list[Product]:
        """Those of block `layer` in the order in which they run (experts' are not among them)."""
