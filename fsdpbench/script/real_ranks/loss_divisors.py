"""The number that a script divides its loss by: read from the graph between the loss and its sum or mean.

If losses are means over different numbers of elements, their mean over ranks gives an element of a short
batch more weight than one of a long batch: the gradient is not that of the mean over all elements. A script
may weight its losses as it likes: a factor of a mean is its weight, not a number of elements.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_PASSING = ("Neg", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias", "Clone", "NanToNum")
_REDUCED = "_AllReduceBackward"  # of torch.distributed.nn
_PRODUCTS = {"Mul": "_saved_other", "Div": "_saved_other", "Dot": "_saved_tensor"}
_MEAN = 1
"""`at::Reduction::Mean`; 0 keeps all elements, 2 sums them."""
_OF_SUM = re.compile(r"/(?:Add|Sub)\d")
_LOW = "(low)"  # marks a factor of a low-precision dtype in a path
_ROUNDED, _ALL_WHOLE = (torch.bfloat16, torch.float16), 128
"""From here on every bfloat16 number is whole, so that a whole divisor proves nothing."""
_EVEN = 0.01
"""Share by which numbers of elements may differ: an element then weighs at most this much more."""
_ROUNDING = 1e-5
"""Share by which the sum of a mask may differ from 1, as with `mask.sum() + 1e-6`; more in bfloat16."""
_SAME = 1e-5  # the share by which the same number may differ in single precision
_AUXILIARY = 0.1
"""A term with less than this share of its loss's largest weight is auxiliary, and may be any mean."""


@dataclass(frozen=True)
class Term:
    """A sum or mean in a loss. `count`: the elements averaged (1: a sum); `weight`: its factor; `divisor`: an
    element of the loss has the weight 1 / `divisor`; `elements`: the number of elements, without those that a
    mask drops."""

    count: float
    weight: float
    divisor: float
    elements: float

    @property
    def total(self) -> float:
        """Return the weight of all elements together: 1 for a mean, unless something multiplies it."""
        return self.elements / abs(self.divisor)


@dataclass(frozen=True)
class Divided:
    """A backward: the script's `lines` that are running, innermost first, and the loss's terms by path."""

    lines: str
    terms: dict[str, Term]


def divided(loss: torch.Tensor, lines: str, factor: float = 1.0) -> Divided:
    """Return the divisors of a loss, before a backward that begins with `factor`: only for terms that are
    sums or means."""
    with torch.no_grad():
        return Divided(lines, dict(_terms(loss.grad_fn, factor, 1.0, "")) if loss.numel() == 1 else {})


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
            rounded = isinstance(other, torch.Tensor) and other.dtype in _ROUNDED
            path += _LOW * rounded
            if kind == "Mul" or (rounded and abs(value) >= _ALL_WHOLE):
                more = factor * value if kind == "Mul" else factor / value, parts
            else:
                more = factor, parts * value
            yield from _terms(below[which], *more, path)
    elif kind in (*_PASSING, _REDUCED):
        added = kind == _REDUCED and node.op == dist.ReduceOp.SUM
        yield from _terms(below[0], factor * (dist.get_world_size(node.group) if added else 1), parts, path)
    elif kind == "Mean":
        all_of_it = node.name() == "MeanBackward0"
        count = node._saved_self_sym_numel if all_of_it else math.prod(node._saved_self_sym_sizes)
        parts, share, _ = _counted(below[0], parts, _PASSING)
        count *= share
        yield path, Term(count, abs(factor / parts), count * parts / factor, count)
    elif reduction == _MEAN:
        divisor = float(getattr(node, "_saved_total_weight", node._saved_self.numel()))
        # With class weights, the targets are counted: ignored ones are negative.
        weighted = getattr(node, "_saved_weight", None) is not None and hasattr(node, "_saved_target")
        count = int((node._saved_target >= 0).sum()) if weighted else divisor
        yield path, Term(count, abs(factor / parts), divisor * parts / factor, count)
    elif kind in ("Sum", "Dot") or reduction:
        parts, _, kept = _counted(node, parts, (*_PASSING, "Sum"))
        # Numbers of elements are exactly whole; other divisors are norms and values of losses.
        count = parts if parts.is_integer() else 1.0
        above, divided, below_it = path.rpartition("/Div")  # sums of chunks with one divisor count as one
        path = above + divided + (_OF_SUM.sub("", below_it) if divided else below_it)
        yield path, Term(count, abs(factor * count / parts), parts / factor, kept or _summands(node))


def _summands(node: Any) -> float:
    """Return the number of elements that a sum adds; for a loss, without targets that it ignores."""
    if hasattr(node, "_saved_self_sym_sizes"):
        return float(math.prod(node._saved_self_sym_sizes))
    given: Any = getattr(node, "_saved_self", None)
    given = node._saved_tensor if given is None else given
    return float(getattr(node, "_saved_total_weight", given.numel()))


def _counted(node: Any, parts: float, passing: Sequence[str]) -> tuple[float, float, float]:
    """Return the divisor of a sum or mean of a node's elements, instead of `parts`; the share of elements
    that a constant mask keeps; and their number (0: no such mask). A mask that then does not add up to 1 is
    a weight."""
    is_mean, mask = "Sum" not in passing, torch.ones(())
    while node is not None and (kind := node.name().partition("Backward")[0]) in (*passing, *_PRODUCTS):
        below = [each for each, _ in node.next_functions]
        if kind in _PRODUCTS:
            if len(below) > 1 and (None not in below or (kind == "Div" and below[0] is None)):
                break  # a ratio or a product of two losses
            other = getattr(node, _PRODUCTS[kind]) if below[0] is not None else node._saved_self
            mask = mask / other if kind == "Div" else mask * other
        node = below[0] or below[-1]
    kept, eps = mask[mask != 0].double(), torch.finfo(mask.dtype).eps
    apart = float(kept.max() - kept.min()) / float(kept.abs().max()) if len(kept) and mask.ndim else 1.0
    total = float(kept.sum()) / parts / (mask.numel() if is_mean else 1)
    number = float(len(kept)) if apart <= _ROUNDING else 0.0
    if not number or not abs(abs(total) - 1) <= max(_ROUNDING, eps):
        return parts, 1.0, number
    return (1.0, number / mask.numel(), number) if is_mean else (number, 1.0, number)


def uneven(backwards: Iterable[Divided]) -> tuple[str, list[float]] | None:
    """Return the line whose means are over different numbers of elements, and these; None if there is none.
    Several equal means in one loss are means of single samples, as the script intends."""
    found: dict[tuple[str, str], list[Term]] = {}
    for each in backwards:
        least = _AUXILIARY * max((term.weight for term in each.terms.values()), default=0.0)
        for path, term in each.terms.items():
            if term.weight >= least:
                found.setdefault((each.lines, path), []).append(term)
    apart = {key: sizes for key, terms in found.items() if (sizes := _uneven_sizes(terms, _LOW in key[1]))}
    kinds = [(key[0], key[1].rsplit("/", 1)[1], f"{found[key][0].weight:.2g}") for key in apart]
    for kind, sizes in zip(kinds, apart.values(), strict=True):
        if kinds.count(kind) == 1:
            return kind[0].partition(" ")[0], sizes
    return None


def parted(steps: Sequence[Sequence[Sequence[Divided]]]) -> tuple[str, list[float]] | None:
    """Return line and weights, by rank, of a term of losses that weighs the same on all ranks in the first
    step, and not in a later one, of as many elements; None if there is none. `steps`: by rank and
    backward."""
    first, *later = ([_weighed(backwards) for backwards in ranks] for ranks in steps)
    for ranks in later:
        for key in set(ranks[0]).intersection(*first, *ranks):
            begun, now = ([each[key] for each in found] for found in (first, ranks))
            weights = [1 / abs(term.divisor) for term in now]
            same = not _differ([abs(term.divisor) for term in begun], _SAME)
            if same and _differ(weights) and not _differ([term.elements for term in now], _SAME):
                least = min(weights)
                return key[1].partition(" ")[0], [weight / least for weight in weights]
    return None


def _weighed(backwards: Sequence[Divided]) -> dict[tuple[int, str, str], Term]:
    every = ((index, each.lines, each.terms) for index, each in enumerate(backwards))
    return {(index, lines, path): term for index, lines, terms in every for path, term in terms.items()}


def of_the_largest(ranks: Sequence[Sequence[Divided]], largest: float) -> list[float]:
    """Return each rank's number of elements, if the losses of all ranks are divided by the `largest` of these
    numbers; otherwise none. The losses may be multiplied by the number of ranks."""
    counts = []
    for rank in ranks:
        terms = [term for each in rank for term in each.terms.values()]
        alike = [term for term in terms if round(largest / abs(term.divisor), 4) in (1, len(ranks))]
        counts.append(sum(term.elements for term in alike))
    return counts if min(counts) < max(counts) == largest else []


def _uneven_sizes(terms: Sequence[Term], rounded: bool) -> list[float]:
    """Return the numbers of elements that terms are means over; none if they are equal, or not means. A sum
    multiplied by the inverse of its own number of elements is a mean too, unless it is `rounded`."""
    counts, elements = [term.count for term in terms], [term.elements for term in terms]
    if _differ([abs(term.divisor) for term in terms]) and _differ(counts):
        return counts
    is_mean = not rounded and not _differ([term.total for term in terms], _SAME)
    return elements if is_mean and _differ(elements) else []


def _differ(values: Sequence[float], share: float = _EVEN) -> bool:
    return max(values) > min(values) * (1 + share)
