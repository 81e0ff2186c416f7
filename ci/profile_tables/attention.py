"""Tables of attention: the model fitted a chip and library, then factors on what it leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fsdpbench.sim.model.chips import Chip
from fsdpbench.sim.model.library_costs import Array, attention_model_seconds, grid_coordinates
from fsdpbench.sim.model.sections import AttentionTable, FactorGrid
from profile_tables.grid_fit import Prior, Task, fit_factors
from profile_tables.measured import Measured

AXES = (
    (1.0, 8.0, 64.0, 512.0, 4096.0),
    (256.0, 1024.0, 4096.0, 16384.0),
    (1.0, 8.0, 64.0),
    (64.0, 128.0),
)
PRIOR = Prior(0.004, 0.004, 0.001, 0.003, 0.002, (3.0, 1.5, 3.0, 1.0))
_NO_FACTORS = FactorGrid(((1.0,),) * 4, (1.0,))
# Logarithms but for wave_quantisation: start, lowest, highest.
_FITTED = {
    "forward_tflops": (-0.8, -4.0, 0.0),
    "head_dim_64": (-0.2, -1.5, 0.3),
    "memory_efficiency": (-0.7, -4.0, 0.5),
    "wave_quantisation": (0.2, 0.0, 1.0),
    "floor_us": (2.3, -1.0, 4.5),
}


def fit_attention(
    rows: Sequence[Measured], chips: Mapping[str, Chip], prior: Prior = PRIOR
) -> dict[tuple[str, str], AttentionTable]:
    """A table for every chip and library that ``rows`` hold."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.gpu, row.library), []).append(row)
    models = {key: _fit_model(group, chips[key[0]]) for key, group in groups.items()}
    left, tasks = [], []
    for row in rows:
        chip = chips[row.gpu]
        model = models[row.gpu, row.library]
        seconds = attention_model_seconds(model, chip.sm_count, chip.memory_bandwidth, *_shape([row]))[0]
        left.append(float(np.log(row.us * 1e-6 / seconds)))
        tasks.append(Task(row.gpu, chip.family, row.library))
    factors = fit_factors(AXES, grid_coordinates(*_shape(rows)), np.array(left), tasks, prior)
    return {
        (task.gpu, task.library): dataclasses.replace(
            models[task.gpu, task.library],
            factors=FactorGrid(AXES, tuple(float(f"{value:.3f}") for value in np.exp(logarithms))),
        )
        for task, logarithms in factors.items()
    }


def _fit_model(rows: Sequence[Measured], chip: Chip) -> AttentionTable:
    shape, measured = _shape(rows), np.array([row.us for row in rows]) * 1e-6
    start, low, high = (np.array([bounds[index] for bounds in _FITTED.values()]) for index in range(3))

    def errors(values: Array) -> Array:
        table = _table(values, chip)
        off = np.log(attention_model_seconds(table, chip.sm_count, chip.memory_bandwidth, *shape) / measured)
        return np.concatenate([off, 0.02 * (values - start)])

    found = least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, max_nfev=200)
    table = _table(found.x, chip)
    figures: dict[str, Any] = {name: float(f"{getattr(table, name):.4g}") for name in _FITTED}
    return dataclasses.replace(table, **figures)


def _table(values: Array, chip: Chip) -> AttentionTable:
    """Rates start from the chip's peak."""
    given = dict(zip(_FITTED, map(float, values), strict=True))
    shares = {name: float(np.exp(value)) for name, value in given.items() if name != "wave_quantisation"}
    shares["forward_tflops"] *= chip.peak_tflops["bf16"]
    return AttentionTable(**shares, wave_quantisation=given["wave_quantisation"], factors=_NO_FACTORS)


def _shape(rows: Sequence[Measured]) -> tuple[Array, Array, Array, Array, Array]:
    names = ("batch", "heads", "kv_heads", "seq", "head_dim")
    batch, heads, kv_heads, seq, head_dim = (
        np.array([float(row.number(name)) for row in rows]) for name in names
    )
    return batch, heads, kv_heads, seq, head_dim
