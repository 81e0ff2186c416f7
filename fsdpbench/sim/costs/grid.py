"""Interpolation between the nodes of a `FactorGrid`: linear in the logarithms, flat beyond the ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdpbench.sim.hardware.library_sections import FactorGrid

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
