"""The number that a script divides its loss by: read from the graph between the loss and its sum or mean.

A mean over ranks of losses that are means over different numbers of elements weighs an element of a short
batch more than one of a long batch: the gradient is not that of the mean over all elements. A script may
weigh its losses as it likes: what multiplies a mean is its weight, and no number of elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PASSING = ("Neg", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias", "Clone", "NanToNum")
_OTHER = {"Dot": "_saved_tensor"}
_MEAN = 1
"""`at::Reduction::Mean`; 0 keeps all elements, 2 adds them."""
_OF_SUM = re.compile(r"/(?:Add|Sub)\d")
_ROUNDED, _ALL_WHOLE = (torch.bfloat16, torch.float16), 128
"""From here on each number of bfloat16 is whole: it says nothing of a divisor."""
_EVEN = 0.01
"""The share by which numbers of elements may differ: an element weighs at most that much more."""
_ROUNDING = 1e-5
"""The share by which a mask adds up to more or less than 1, as with `mask.sum() + 1e-6`; of bfloat16 more."""
_AUXILIARY = 0.1
"""A term of less than this share of its loss' largest weight serves training, and is any mean."""


@dataclass(frozen=True)
class Term:
    """A sum or mean in a loss: the `count` of elements that it is a mean over (1: a sum), what that is
    multiplied by, and the number `divisor` of which an element weighs 1."""

    count: float
    weight: float
    divisor: float


@dataclass(frozen=True)
class Divided:
    """A backward: `lines` of the script that run, the innermost first, and the terms of its loss by path."""

    lines: str
    terms: dict[str, Term]


def divided(loss: torch.Tensor, lines: str) -> Divided:
    """Return what a loss is divided by, before its backward: only of its terms that are sums or means."""
    with torch.no_grad():
        return Divided(lines, dict(_terms(loss.grad_fn, 1.0, 1.0, "")) if loss.numel() == 1 else {})


def _terms(node: Any, factor: float, parts: float, path: str) -> Iterator[tuple[str, Term]]:
    """Yield each sum or mean below a node, whose value is multiplied by `factor` and divided by `parts`."""
    if node is None or not factor:
        return
    kind = node.name().removesuffix("Backward0").removesuffix("Backward1")
    path = f"{path}/{kind}"
    below = [each for each, _ in node.next_functions]
    reduction = getattr(node, "_saved_reduction", None)
    if kind in ("Add", "Sub"):
        for index, each in enumerate(below):
            yield from _terms(each, factor, parts, f"{path}{index}")
    elif kind in ("Div", "Mul"):
        which = 0 if below[0] is not None else 1
        other = node._saved_other if which == 0 else node._saved_self
        if (len(below) > 1 and None not in below) or (which and kind == "Div"):
            return  # a ratio or a product of two losses
        if isinstance(other, (int, float)) or other.ndim == 0:
            value = float(other) or 1.0
            rounded = isinstance(other, torch.Tensor) and other.dtype in _ROUNDED and abs(value) >= _ALL_WHOLE
            if kind == "Mul" or rounded:
                more = factor * value if kind == "Mul" else factor / value, parts
            else:
                more = factor, parts * value
            yield from _terms(below[which], *more, path)
    elif kind in _PASSING:
        yield from _terms(below[0], factor, parts, path)
    elif kind == "Mean":
        all_of_it = node.name() == "MeanBackward0"
        count = node._saved_self_sym_numel if all_of_it else math.prod(node._saved_self_sym_sizes)
        mask = _masked(below[0], _PASSING)
        if mask is not None and mask.adds_up_to_one(mask.size * parts):
            parts, count = 1.0, count * mask.ones / mask.size
        yield path, Term(count, abs(factor / parts), count * parts / factor)
    elif reduction == _MEAN:
        divisor = float(getattr(node, "_saved_total_weight", node._saved_self.numel()))
        # Of weighted classes, targets count: ignored ones are negative.
        weighted = getattr(node, "_saved_weight", None) is not None and hasattr(node, "_saved_target")
        count = int((node._saved_target >= 0).sum()) if weighted else divisor
        yield path, Term(count, abs(factor / parts), divisor * parts / factor)
    elif kind in ("Sum", "Dot") or reduction:
        mask = _masked(node if kind == "Dot" else below[0], (*_PASSING, "Sum"))
        if mask is not None and mask.adds_up_to_one(parts):
            parts = float(mask.ones)
        # Numbers of elements are exactly whole; others are norms and values of losses.
        count = parts if parts.is_integer() else 1.0
        above, divided, below_it = path.rpartition("/Div")  # sums of chunks that are divided together are one
        path = above + divided + (_OF_SUM.sub("", below_it) if divided else below_it)
        yield path, Term(count, abs(factor * count / parts), parts / factor)


@dataclass(frozen=True)
class _Mask:
    """A constant of `size` elements that multiplies those of a sum: `ones` of them are `value`, others 0."""

    size: int
    ones: int
    value: float
    eps: float

    def adds_up_to_one(self, parts: float) -> bool:
        """Return whether its sum, divided by `parts`, is 1: it makes a mean of `ones` elements."""
        return abs(abs(self.ones * self.value / parts) - 1) <= max(_ROUNDING, self.eps)


def _masked(node: Any, passing: Sequence[str]) -> _Mask | None:
    """Return the mask that elements are multiplied by before they are added, None for none."""
    value: Any = 1.0
    while node is not None:
        kind = node.name().removesuffix("Backward0").removesuffix("Backward1")
        below = [each for each, _ in node.next_functions]
        if kind in ("Mul", "Div", "Dot"):
            first = below[0] is not None
            if (len(below) > 1 and None not in below) or (kind == "Div" and not first):
                break
            other = node._saved_self if not first else getattr(node, _OTHER.get(kind, "_saved_other"))
            value, node = value / other if kind == "Div" else value * other, below[0] or below[1]
        elif kind in passing:
            node = below[0]
        else:
            break
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return None
    found = value[value != 0].double()
    if not len(found) or float(found.max() - found.min()) > _ROUNDING * float(found.abs().max()):
        return None
    eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    return _Mask(value.numel(), len(found), float(found[0]), eps)


def uneven(backwards: Iterable[Divided]) -> tuple[str, list[float]] | None:
    """Return the line whose means are over different numbers of elements, and these; None if there is none.
    Of several alike in one loss each is of a sample, as the script wants it."""
    found: dict[tuple[str, str], list[Term]] = {}
    for each in backwards:
        least = _AUXILIARY * max((term.weight for term in each.terms.values()), default=0.0)
        for path, term in each.terms.items():
            if term.weight >= least:
                found.setdefault((each.lines, path), []).append(term)
    apart = {key: terms for key, terms in found.items() if _are_uneven(terms)}
    kinds = [(key[0], key[1].rsplit("/", 1)[1], f"{terms[0].weight:.2g}") for key, terms in apart.items()]
    for kind, terms in zip(kinds, apart.values(), strict=True):
        if kinds.count(kind) == 1:
            return kind[0].partition(" ")[0], [term.count for term in terms]
    return None


def _are_uneven(terms: Sequence[Term]) -> bool:
    columns = [abs(term.divisor) for term in terms], [term.count for term in terms]
    return all(max(column) > min(column) * (1 + _EVEN) for column in columns)
