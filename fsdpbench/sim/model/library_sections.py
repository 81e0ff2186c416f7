"""Optional sections of a hardware profile: isolated operators as one library runs them.

A library's tables (`[libraries.NAME]`) are fitted to measured operators by `ci/fit_profiles.py`. A profile's
`runs_use` names the libraries whose tables price training runs; without it they are priced by the sections
`[gemm]`, `[attention]` and `[nvlink]`, and the tables serve products that those do not know (fp8, nvfp4).
Models: `fsdpbench.sim.model.library_products`, `library_attention` and `fsdpbench.sim.model.network`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fsdpbench.sim.model.keys import require
from fsdpbench.sim.model.sections import TILE, require_columns

PRODUCT_TYPES = ("bf16", "fp8", "nvfp4")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def _require_rising(key: str, values: tuple[float, ...]) -> None:
    rising = len(values) > 0 and values[0] > 0 and list(values) == sorted(set(values))
    require(rising, key, values, "must be positive and rise strictly")


@dataclass(frozen=True)
class FactorGrid:
    """Factors on the model's time at the nodes of ``axes``; between them linear in the logarithms.

    ``factors`` lists the nodes with the last axis fastest.
    """

    axes: tuple[tuple[float, ...], ...]
    factors: tuple[float, ...]
    table: ClassVar[str] = "libraries.factors"

    def __post_init__(self) -> None:
        for axis in self.axes:
            _require_rising("axes", axis)
        wanted = math.prod(map(len, self.axes))
        require(len(self.factors) == wanted, "factors", len(self.factors), f"must be {wanted} values")


@dataclass(frozen=True)
class ProductTable:
    """Matrix products of one type: the tile model of `kernel_costs` and factors on (m, n, k).

    ``operand_bytes`` is an element of both factors, its scales included. ``quantise`` counts how often the
    first factor is read in 16 bits and written again before (0: it comes quantised). What fits into
    ``cache_mib`` is read ``cache_gain`` times as fast.
    """

    peak_tflops: float
    operand_bytes: float
    tiles: tuple[tuple[float, ...], ...]
    sustained: float
    memory_efficiency: float
    prologue_k: float
    wave_quantisation: float
    floor_us: float
    quantise: float
    cache_mib: float
    cache_gain: float
    factors: FactorGrid
    table: ClassVar[str] = "libraries.products"

    def __post_init__(self) -> None:
        require_columns("tiles", self.tiles, TILE)
        require(len(self.factors.axes) == 3, "factors.axes", len(self.factors.axes), "are m, n and k")


@dataclass(frozen=True)
class AttentionTable:
    """Attention forward: the model of `fsdpbench.sim.model.attention_costs`, with factors on it.

    The factors' axes are batch times heads, length, heads that share a key, and head size.
    """

    forward_tflops: float
    head_dim_64: float
    memory_efficiency: float
    wave_quantisation: float
    floor_us: float
    factors: FactorGrid
    table: ClassVar[str] = "libraries.attention"

    def __post_init__(self) -> None:
        axes = len(self.factors.axes)
        require(axes == 4, "factors.axes", axes, "are batch x heads, length, shared heads, head size")


@dataclass(frozen=True)
class RankCurve:
    """A collective among ``ranks`` GPUs of a node: ``points`` of ``[bytes of the full buffer, us]``."""

    ranks: int
    points: tuple[tuple[float, ...], ...]
    table: ClassVar[str] = "libraries.collectives"

    def __post_init__(self) -> None:
        require_columns("points", self.points, ("bytes", "us"))
        sizes, times = (tuple(point[index] for point in self.points) for index in (0, 1))
        _require_rising("points", sizes)
        require(list(times) == sorted(times), "points", times, "more bytes must not take less")


@dataclass(frozen=True)
class LibraryTables:
    """What one library's operators take. Any part may be missing.

    ``switch_from`` is the number of ranks from which collectives are reduced in the switch (0: never);
    ``source`` says where the measurements come from.
    """

    version: str
    source: str
    products: Mapping[str, ProductTable] = dataclasses.field(default_factory=dict)
    attention: AttentionTable | None = None
    collectives: Mapping[str, tuple[RankCurve, ...]] = dataclasses.field(default_factory=dict)
    switch_from: int = 0
    table: ClassVar[str] = "libraries"

    def __post_init__(self) -> None:
        for kind in self.products:
            require(kind in PRODUCT_TYPES, "products", kind, f"known types are {', '.join(PRODUCT_TYPES)}")
        for kind, curves in self.collectives.items():
            require(kind in COLLECTIVES, "collectives", kind, f"known are {', '.join(COLLECTIVES)}")
            require(len(curves) > 0, f"collectives.{kind}", curves, "needs at least one curve")
            _require_rising(f"collectives.{kind}.ranks", tuple(float(curve.ranks) for curve in curves))
        require(
            bool(self.source), "source", self.source, "must not be empty: say where the figures come from"
        )
