"""Tables of matrix products: the tile model of a chip, type and library, then factors on what it leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fsdpbench.sim.model.chips import Chip
from fsdpbench.sim.model.library_costs import Array, product_model_seconds
from fsdpbench.sim.model.sections import FactorGrid, ProductTable
from profile_tables.grid_fit import Prior, Task, fit_factors
from profile_tables.measured import Measured

AXES = (
    (64.0, 256.0, 1024.0, 4096.0, 32768.0),
    (256.0, 1024.0, 4096.0, 16384.0, 65536.0),
    (256.0, 1024.0, 4096.0, 16384.0, 65536.0),
)
PRIOR = Prior(0.003, 0.003, 0.001, 0.003, 0.003, (1.5, 1.5, 1.5))
TYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
# An nvfp4 element is half a byte, and 16 of them share a scale of one.
_OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
# Tiles whose efficiencies are fitted together, the largest's being 1.
_TILES = (
    ((256, 256),),
    ((256, 128), (128, 256)),
    ((128, 128),),
    ((128, 64), (64, 128)),
    ((64, 64),),
    ((64, 256), (256, 64)),
)


@dataclass(frozen=True)
class _Parameter:
    """One fitted figure: where it starts, its bounds, and how strongly it is held at its start."""

    start: float
    low: float
    high: float
    hold: float
    scale: float


# Logarithms but for prologue_k, wave_quantisation and cache_gain.
_PARAMETERS = {
    "sustained": _Parameter(-0.25, -2.0, 0.0, 0.02, 0.1),
    "memory_efficiency": _Parameter(-0.2, -1.5, 0.0, 0.02, 0.1),
    "prologue_k": _Parameter(60.0, 0.0, 800.0, 0.002, 30.0),
    "wave_quantisation": _Parameter(0.3, 0.0, 1.0, 0.05, 0.2),
    "floor_us": _Parameter(1.0, -2.0, 4.0, 0.02, 0.3),
    "tile1": _Parameter(-0.05, -1.5, 0.0, 0.1, 0.1),
    "tile2": _Parameter(-0.1, -1.5, 0.0, 0.1, 0.1),
    "tile3": _Parameter(-0.3, -1.5, 0.0, 0.1, 0.1),
    "tile4": _Parameter(-0.5, -1.5, 0.0, 0.1, 0.1),
    "tile5": _Parameter(-0.2, -1.5, 0.0, 0.1, 0.1),
    "quantise": _Parameter(-3.0, -6.0, 2.0, 0.05, 0.5),
    "cache_gain": _Parameter(1.2, 1.0, 3.0, 0.1, 0.2),
}
_NO_FACTORS = FactorGrid(((1.0,),) * 3, (1.0,))


def fit_products(
    rows: Sequence[Measured], chips: Mapping[str, Chip], prior: Prior = PRIOR
) -> dict[tuple[str, str, str], ProductTable]:
    """A table for every chip, library and type that ``rows`` hold."""
    tables: dict[tuple[str, str, str], ProductTable] = {}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        of_type = [row for row in rows if row.dtype == dtype]
        models = _models(of_type, chips)
        left = np.array([_residual(row, models[row.gpu, row.library], chips) for row in of_type])
        tasks = [Task(row.gpu, chips[row.gpu].family, row.library) for row in of_type]
        factors = fit_factors(AXES, _shape(of_type), left, tasks, prior)
        for task, logarithms in factors.items():
            grid = FactorGrid(AXES, tuple(float(f"{value:.3f}") for value in np.exp(logarithms)))
            model = models[task.gpu, task.library]
            tables[task.gpu, task.library, TYPES[dtype]] = dataclasses.replace(model, factors=grid)
    return tables


def _models(rows: Sequence[Measured], chips: Mapping[str, Chip]) -> dict[tuple[str, str], ProductTable]:
    groups: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.gpu, row.library), []).append(row)
    return {key: fit_model(group, chips[key[0]]) for key, group in groups.items()}


def fit_model(rows: Sequence[Measured], chip: Chip) -> ProductTable:
    """The tile model of one chip, library and type, without factors."""
    kind, quantises = TYPES[rows[0].dtype], rows[0].dtype != "bfloat16"
    shape, measured = _shape(rows), np.array([row.us for row in rows]) * 1e-6
    held = _PARAMETERS.values()
    start = np.array([parameter.start for parameter in held])
    hold = np.array([parameter.hold for parameter in held])

    def errors(values: Array) -> Array:
        table = _table(values, kind, chip, quantises)
        off = np.log(product_model_seconds(table, chip.sm_count, chip.memory_bandwidth, *shape) / measured)
        return np.concatenate([off, hold * (values - start)])

    found = least_squares(
        errors,
        start,
        bounds=([p.low for p in held], [p.high + 1e-9 for p in held]),
        x_scale=[p.scale for p in held],
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=80,
    )
    return _rounded(_table(found.x, kind, chip, quantises))


def _rounded(table: ProductTable) -> ProductTable:
    """Figures as a file shows them. While fitting they stay exact, for the fit goes by small steps."""
    names = (
        "sustained",
        "memory_efficiency",
        "prologue_k",
        "wave_quantisation",
        "floor_us",
        "quantise",
        "cache_gain",
    )
    figures: dict[str, Any] = {name: float(f"{getattr(table, name):.4g}") for name in names}
    tiles = tuple((rows, columns, float(f"{share:.4g}")) for rows, columns, share in table.tiles)
    return dataclasses.replace(table, tiles=tiles, **figures)


def _table(values: Array, kind: str, chip: Chip, quantises: bool) -> ProductTable:
    given = dict(zip(_PARAMETERS, map(float, values), strict=True))

    def share(name: str) -> float:
        return min(1.0, float(np.exp(given[name])))

    efficiencies = [1.0, *(share(f"tile{index}") for index in range(1, len(_TILES)))]
    return ProductTable(
        peak_tflops=chip.peak_tflops[kind],
        operand_bytes=_OPERAND_BYTES[kind],
        tiles=tuple(
            (float(rows), float(columns), efficiency)
            for alike, efficiency in zip(_TILES, efficiencies, strict=True)
            for rows, columns in alike
        ),
        sustained=share("sustained"),
        memory_efficiency=share("memory_efficiency"),
        prologue_k=given["prologue_k"],
        wave_quantisation=given["wave_quantisation"],
        floor_us=float(np.exp(given["floor_us"])),
        quantise=float(np.exp(given["quantise"])) if quantises else 0.0,
        cache_mib=chip.cache_mib,
        cache_gain=given["cache_gain"],
        factors=_NO_FACTORS,
    )


def _residual(row: Measured, model: ProductTable, chips: Mapping[str, Chip]) -> float:
    chip = chips[row.gpu]
    seconds = product_model_seconds(model, chip.sm_count, chip.memory_bandwidth, *_shape([row]))[0]
    return float(np.log(row.us * 1e-6 / seconds))


def _shape(rows: Sequence[Measured]) -> tuple[Array, Array, Array]:
    m, n, k = (np.array([float(row.number(name)) for row in rows]) for name in ("m", "n", "k"))
    return m, n, k
