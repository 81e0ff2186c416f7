"""The number that a script divides its loss by: read from the graph between the loss and its sum or mean.

A mean over ranks of losses that are means over different numbers of elements weighs an element of a short
batch more than one of a long batch: the gradient is not that of the mean over all elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_PASSING = ("Neg", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias", "Clone")
_MEAN = 1
"""`at::Reduction::Mean`; 0 means none, 2 means the sum."""


@dataclass(frozen=True)
class Divided:
    """A backward: the script's line `place`, and the divisor of each term of its loss by the term's path."""

    place: str
    terms: dict[str, float]


def divided(loss: torch.Tensor, place: str) -> Divided:
    """Return what a loss is divided by, before its backward; terms that are neither sums nor means are not
    in it."""
    with torch.no_grad():
        return Divided(place, dict(_terms(loss.grad_fn, 1.0, "")) if loss.numel() == 1 else {})


def _terms(node: Any, factor: float, path: str) -> Iterator[tuple[str, float]]:
    """Yield the path and the divisor of each sum or mean below a node, whose value is multiplied by
    `factor`."""
    if node is None or not factor:
        return
    kind = node.name().removesuffix("Backward0").removesuffix("Backward1")
    path = f"{path}/{kind}"
    below = [each for each, _ in node.next_functions]
    if kind in ("Add", "Sub"):
        for index, each in enumerate(below):
            yield from _terms(each, factor, f"{path}{index}")
    elif kind in ("Div", "Mul"):
        which = 0 if below[0] is not None else 1
        other = node._saved_other if which == 0 else node._saved_self
        if isinstance(other, (int, float)) or other.ndim == 0:
            value = float(other) or 1.0
            yield from _terms(below[which], factor * value if kind == "Mul" else factor / value, path)
    elif kind in _PASSING:
        yield from _terms(below[0], factor, path)
    elif kind == "Sum":
        yield path, 1 / factor
    elif kind == "Mean":
        all_of_it = node.name() == "MeanBackward0"
        count = node._saved_self_sym_numel if all_of_it else math.prod(node._saved_self_sym_sizes)
        yield path, count / factor
    elif (reduction := getattr(node, "_saved_reduction", None)) is not None and reduction:
        count = getattr(node, "_saved_total_weight", None)
        elements = float(node._saved_self.numel() if count is None else count)
        yield path, (elements if reduction == _MEAN else 1) / factor
