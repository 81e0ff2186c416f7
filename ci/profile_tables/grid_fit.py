"""Factors at the nodes of a grid, from what a model leaves of measured times.

A measurement's residual (the logarithm of measured over modelled) is the weighted sum of the nodes around
it. Nodes near each other are alike, and so are those of one library on relatives of a chip; both are
expressed by a Gaussian prior, whose four parts are a table's own, what a library has in common on a chip's
family, on all chips, and what a family has in common under all libraries. The prior keeps nodes without
measurements near 1 and is the only guard against overfitting that is needed: its variances and lengths were
chosen on held-out rows. Rows far off the rest count less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdpbench.sim.model.library_costs import Array, node_weights

_ROUNDS = 4
_OUTLIER = 1.5


@dataclass(frozen=True)
class Prior:
    """Variances of the four parts, of a measurement, and how many octaves nodes are alike along each axis."""

    own: float
    library_on_family: float
    library: float
    family: float
    noise: float
    octaves: tuple[float, ...]


@dataclass(frozen=True)
class Task:
    """Whose measurement it is."""

    gpu: str
    family: str
    library: str


def fit_factors(
    axes: Sequence[Sequence[float]],
    coordinates: Sequence[Array],
    residuals: Array,
    tasks: Sequence[Task],
    prior: Prior,
) -> dict[Task, Array]:
    """Logarithms of the factors at the nodes, for each distinct task."""
    weights = node_weights(axes, *coordinates)
    nodes = _node_covariance(axes, prior.octaves)
    shared = _task_covariance(tasks, tasks, prior)
    covariance = (weights @ nodes @ weights.T) * shared
    noise = np.full(len(residuals), prior.noise)
    for _ in range(_ROUNDS):
        solved = np.linalg.solve(covariance + np.diag(noise), residuals)
        left = np.abs(residuals - covariance @ solved) / np.sqrt(prior.noise)
        noise = prior.noise * np.maximum(1.0, left / _OUTLIER)
    wanted = list(dict.fromkeys(tasks))
    spread = nodes @ weights.T
    to_tasks = _task_covariance(wanted, tasks, prior)
    return {task: spread @ (to_tasks[index] * solved) for index, task in enumerate(wanted)}


def _node_covariance(axes: Sequence[Sequence[float]], octaves: Sequence[float]) -> Array:
    covariance = np.ones((1, 1))
    for axis, length in zip(axes, octaves, strict=True):
        places = np.log2(np.asarray(axis, dtype=float)) / length
        covariance = np.kron(covariance, np.exp(-0.5 * (places[:, None] - places[None]) ** 2))
    return covariance


def _task_covariance(first: Sequence[Task], second: Sequence[Task], prior: Prior) -> Array:
    def same(*names: str) -> Array:
        keys: dict[tuple[str, ...], int] = {}
        left, right = (
            np.array([keys.setdefault(tuple(getattr(t, name) for name in names), len(keys)) for t in tasks])
            for tasks in (first, second)
        )
        return (left[:, None] == right[None]).astype(float)

    return (
        prior.own * same("gpu", "library")
        + prior.library_on_family * same("family", "library")
        + prior.library * same("library")
        + prior.family * same("family")
    )
