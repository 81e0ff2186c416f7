"""Curves of collectives by number of ranks, from measured tables that lack sizes.

A curve is latency plus bytes over a bandwidth, times what a Gaussian process says of the residuals: close
to the measurement where there is one, and elsewhere like curves that are related (the other operator of the
pair gather and scatter, another chip of the family, another number of ranks), which change their protocol at
the same sizes. Times are then made to rise with the bytes, and points that are on the line between their
neighbours are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpbench.sim.model.chips import Chip
from fsdpbench.sim.model.library_costs import Array
from fsdpbench.sim.model.sections import RankCurve
from profile_tables.grid_fit import Task
from profile_tables.measured import Measured

_SIZES = tuple(1 << power for power in range(9, 30))
# A point that the line through its neighbours meets this closely is left out.
_STRAIGHT = 0.004
_PAIR = {"all_gather", "reduce_scatter"}


@dataclass(frozen=True)
class CurvePrior:
    """How alike residuals are: their variance, a measurement's, octaves, and correlation of relatives."""

    variance: float = 0.1
    noise: float = 0.0006
    near_octaves: float = 0.8
    far_octaves: float = 4.0
    far_share: float = 0.5
    family: float = 0.9
    pair: float = 0.9
    operator: float = 0.4
    ranks: float = 0.4


@dataclass(frozen=True)
class _Curve:
    task: Task
    operator: str
    ranks: int


def fit_collectives(
    rows: Sequence[Measured], chips: Mapping[str, Chip], prior: CurvePrior | None = None
) -> dict[str, dict[str, tuple[RankCurve, ...]]]:
    """By chip and collective, one curve a number of ranks."""
    prior = prior or CurvePrior()
    curves: dict[_Curve, list[Measured]] = {}
    for row in rows:
        task = Task(row.gpu, chips[row.gpu].family, row.library)
        operator = str(row.columns["op"]).replace("alltoall", "all_to_all")
        curves.setdefault(_Curve(task, operator, row.number("gpus")), []).append(row)
    models = {curve: _line(of_curve) for curve, of_curve in curves.items()}
    owners = [curve for curve, of_curve in curves.items() for _ in of_curve]
    sizes = np.array([float(row.number("bytes")) for of_curve in curves.values() for row in of_curve])
    measured = np.log([row.us for of_curve in curves.values() for row in of_curve])
    expected = np.array(
        [_on_line(models[curve], size) for curve, size in zip(owners, sizes, strict=True)], dtype=float
    )
    covariance = _covariance(owners, sizes, owners, sizes, prior) + prior.noise * np.eye(len(sizes))
    solved = np.linalg.solve(covariance, measured - expected)
    found: dict[str, dict[str, tuple[RankCurve, ...]]] = {}
    for curve in sorted(curves, key=lambda c: (c.task.gpu, c.operator, c.ranks)):
        nodes = np.array(_SIZES, dtype=float)
        residual = _covariance([curve] * len(nodes), nodes, owners, sizes, prior) @ solved
        times = _rising(_on_line(models[curve], nodes) + residual)
        points = tuple((float(nodes[index]), float(f"{np.exp(times[index]):.4g}")) for index in _bends(times))
        of_gpu = found.setdefault(curve.task.gpu, {})
        of_gpu[curve.operator] = (*of_gpu.get(curve.operator, ()), RankCurve(curve.ranks, points))
    return found


def _line(rows: Sequence[Measured]) -> Array:
    """Logarithms of the latency (us) and of the microseconds a byte: those of the smallest and the largest,
    so that a curve whose largest size is missing continues with the bandwidth of the largest it has."""
    latency = min(row.us for row in rows)
    largest = max(rows, key=lambda row: row.number("bytes"))
    return np.log([latency, max(largest.us - latency, 0.1 * largest.us) / largest.number("bytes")])


def _on_line(line: Array, sizes: Array | float) -> Array:
    return np.asarray(np.log(np.exp(line[0]) + np.exp(line[1]) * np.asarray(sizes)))


def _covariance(
    first: Sequence[_Curve],
    first_sizes: Array,
    second: Sequence[_Curve],
    second_sizes: Array,
    prior: CurvePrior,
) -> Array:
    apart = (np.log2(first_sizes)[:, None] - np.log2(second_sizes)[None]) ** 2
    near = np.exp(-0.5 * apart / prior.near_octaves**2)
    far = np.exp(-0.5 * apart / prior.far_octaves**2)
    alike = _alike(first, second, prior)
    return np.asarray(prior.variance * alike * ((1 - prior.far_share) * near + prior.far_share * far))


def _alike(first: Sequence[_Curve], second: Sequence[_Curve], prior: CurvePrior) -> Array:
    rows, columns = list(dict.fromkeys(first)), list(dict.fromkeys(second))
    table = np.array([[_relation(a, b, prior) for b in columns] for a in rows])
    left, right = (
        [distinct.index(curve) for curve in curves] for distinct, curves in ((rows, first), (columns, second))
    )
    return np.asarray(table[np.ix_(left, right)])


def _relation(a: _Curve, b: _Curve, prior: CurvePrior) -> float:
    """A correlation that is one product of correlations a property, so that it stays a covariance."""
    chip = 1.0 if a.task.gpu == b.task.gpu else prior.family if a.task.family == b.task.family else 0.0
    if a.operator == b.operator:
        operator = 1.0
    else:
        operator = prior.pair if {a.operator, b.operator} == _PAIR else prior.operator
    return chip * operator * (1.0 if a.ranks == b.ranks else prior.ranks)


def _rising(values: Array) -> Array:
    """The nearest values that never fall (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (high, some), (low, others) = pools[-2:]
            pools[-2:] = [((high * some + low * others) / (some + others), some + others)]
    return np.array([value for value, count in pools for _ in range(count)])


def _bends(times: Array) -> list[int]:
    """Indices of the points that a line through the others would miss."""
    kept = [0, len(times) - 1]
    while True:
        line = np.interp(np.arange(len(times)), kept, times[kept])
        worst = int(np.abs(line - times).argmax())
        if abs(line[worst] - times[worst]) <= _STRAIGHT:
            return kept
        kept = sorted({*kept, worst})
