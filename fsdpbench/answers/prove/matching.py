"""Classify wrong gradients: another factor, only some ranks or microbatches, another rank's, an old one.

Tolerances follow from dtypes and numbers of summands. With N ranks, M microbatches and K summands in a
microbatch, two correct results differ by at most this share of the mean magnitude of the ranks' gradients:

    e_r (N + M + 1) / 2   e_r: machine epsilon of the reduce dtype. A sum over ranks is converted, added
                          N - 1 times over ranks and M - 1 times over microbatches, and scaled at most twice.
                          Each operation rounds once, by up to half an epsilon. In addition, float16
                          subnormals lose up to (N + 1) M of their steps.
    4 e_c                 e_c: machine epsilon of the coarsest dtype of parameters and layers. The product,
                          the activation, its gradient and the parameter's gradient round once each; errors of
                          several layers are independent.
    e_32 (K + 8)          sums in single precision, in another order; 8: conversions, scaling and division.

If layers compute below single precision, depth, softmax and cancellation amplify rounding. If a gradient then
differs by more and matches no fault, the reference runs again with each weight perturbed at random by up to
half an epsilon. NOISE times the resulting change is allowed in addition.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fsdpbench.script.real_ranks.pieces import Piece

_SINGLE = torch.finfo(torch.float32).eps
_HALF = torch.finfo(torch.float16)
_CONVERSIONS = 8
_LAYER = 4
NOISE = 3
_DISTINCT = 0.5
"""A candidate explains a gradient if its distance is below this share of the distance to the correct one."""
_MOST_SUBSETS = 8
"""Maximum number of microbatches for which every subset is tried."""


@dataclass(frozen=True)
class Known:
    """The reference of one parameter in one step: `local` gradients by rank and microbatch, their `mean`, the
    mean of their magnitudes (`bound`), the factor of the sum over ranks (`scale`), the `tolerance` as a share
    of the magnitude, and an absolute tolerance (`floor`)."""

    mean: torch.Tensor
    bound: torch.Tensor
    local: Sequence[Sequence[torch.Tensor]]
    scale: float
    tolerance: float
    floor: float

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.local)


def tolerance(computes: float, summands: int) -> float:
    """Return the relative difference that two correct losses or unreduced gradients may have; `computes`: the
    machine epsilon of the layers."""
    return _LAYER * computes + _SINGLE * (summands + _CONVERSIONS)


def reduction(reduces: float, ranks: int, microbatches: int) -> tuple[float, float]:
    """Return the additional tolerance of a reduction: relative to the gradient's magnitude, and absolute for
    each element. `reduces`: the machine epsilon of the reduce dtype."""
    lost = _HALF.smallest_normal * _HALF.eps * (ranks + 1) * microbatches
    return reduces / 2 * (ranks + microbatches + 1), lost if reduces == _HALF.eps else 0.0


def cut(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the part of a full tensor that corresponds to a rank's piece."""
    found = whole.reshape(-1) if piece.flat else whole
    for dim, (start, length) in enumerate(zip(piece.offset, piece.values.shape, strict=True)):
        found = found.narrow(dim, start, length)
    return found


def is_right(pieces: Sequence[Piece], known: Known) -> bool:
    """Return whether each rank's piece matches the mean."""
    return _all_match(pieces, [known.mean] * known.ranks, known)


def explain(pieces: Sequence[Piece], known: Known, before: Sequence[Piece | None] | None) -> str:
    """Describe what is wrong with incorrect gradients; return an empty string if they match no candidate.
    `before`: gradients of the previous step."""
    factor = _factor(pieces, known)
    if factor:
        return factor
    most = _DISTINCT * distance_of(pieces, known)
    for words, expected in _candidates(known):
        if _all_match(pieces, expected, known, most=most):
            return words
    sums = [
        replace(now, values=now.values.double() - old.values.double())
        for now, old in zip(pieces, before or (), strict=False)
        if old is not None and old.values.shape == now.values.shape
    ]
    right = len(sums) == len(pieces) and is_right(sums, known)
    return "still contains the gradient of the step before" if right else ""


def _factor(pieces: Sequence[Piece], known: Known) -> str:
    """Describe the fault of a gradient that is a multiple of the correct one; empty if it is not."""
    ranks = known.ranks
    pairs = [(each.values.double(), cut(known.mean, each)) for each in pieces]
    size = sum(float(right.square().sum()) for _, right in pairs)
    factor = sum(float((got * right).sum()) for got, right in pairs) / size if size else 0.0
    if not factor or not _all_match(pieces, [known.mean * factor] * ranks, known, abs(factor)):
        return ""
    for value, words in (
        (ranks, f"not divided by the {ranks} ranks"),
        (1 / ranks, f"divided by the {ranks} ranks twice"),
        (2, "twice as large: reduced, or added, twice"),
    ):
        if abs(factor / value - 1) < 0.02:
            return words
    return f"{factor:.4g} times as large"


def _candidates(known: Known) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield possible faults, each with the gradient that every rank would have."""
    ranks, local = known.ranks, known.local
    own = [_sum(each) for each in local]
    yield "each rank keeps its own", own
    yield "each rank keeps its own, divided", [each / ranks for each in own]
    for other in range(ranks):
        yield f"that of rank {other} alone", [own[other]] * ranks
    for size in (size for size in range(2, ranks) if ranks % size == 0):
        for stride in {1, ranks // size}:  # neighbours, or one of each row of neighbours
            part = [rank // size if stride == 1 else rank % stride for rank in range(ranks)]
            groups = [[other for other in range(ranks) if part[other] == each] for each in part]
            for divisor in (size, ranks, 1):
                sums = [_sum(own[each] for each in group) / divisor for group in groups]
                yield f"reduced over {size} of the {ranks} ranks only", sums
    count = len(local[0])
    sizes = range(1, count) if count <= _MOST_SUBSETS else ()
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(count), size) for size in sizes):
        reduced = _sum(each[index] for each in local for index in chosen) * known.scale
        named = ", ".join(str(index + 1) for index in chosen)
        yield f"of microbatch {named} of {count} only", [reduced] * ranks
        rest = [index for index in range(count) if index not in chosen]
        mixed = [reduced + _sum(each[index] for index in rest) for each in local]
        yield f"only microbatch {named} of {count} is reduced", mixed


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*tensors]).sum(0)


def _all_match(
    pieces: Sequence[Piece],
    expected: Sequence[torch.Tensor],
    known: Known,
    size: float = 1.0,
    most: float = math.inf,
) -> bool:
    """Return whether each rank's piece matches its part of `expected`, within the tolerance of a magnitude of
    `size` times the bound (or its own), and within the share `most` of the correct gradient."""
    for piece, whole in zip(pieces, expected, strict=True):
        if not piece.values.numel():
            continue
        part = cut(whole, piece)
        error = float((piece.values.double() - part).norm())
        allowed = known.tolerance * max(size * float(cut(known.bound, piece).norm()), float(part.norm()))
        allowed += known.floor * piece.values.numel() ** 0.5
        if not error <= min(allowed, most * float(cut(known.mean, piece).norm())):
            return False
    return True


def distance_of(pieces: Sequence[Piece], known: Known) -> float:
    """Return the relative distance of gradients from the correct ones."""
    errors = [float((each.values.double() - cut(known.mean, each)).square().sum()) for each in pieces]
    sizes = [float(cut(known.mean, each).square().sum()) for each in pieces]
    return (sum(errors) / max(sum(sizes), 1e-300)) ** 0.5
