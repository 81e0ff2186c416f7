"""Part 1 of a proof: gradients, losses and weights of the sharded script against the unsharded one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from fsdpbench.answers.prove.matching import Fault, Known, explain, is_right, tolerance
from fsdpbench.answers.prove.real_runs import Pair
from fsdpbench.base.errors import CannotJudgeError
from fsdpbench.script.real_ranks.pieces import Piece, Whole, weights_of, whole
from fsdpbench.script.real_ranks.watching import StepRecord, Wrapping

_Named = tuple[Fault, str]
"""A fault, and it in words."""
_LISTED = 2
_NEAR = 64
"""Machine epsilons by which the same update may differ: some dozen elementwise operations."""


@dataclass(frozen=True)
class Finding:
    """A fault that parameters share, in words, and the script's line that wrapped them."""

    fault: Fault
    what: str
    names: tuple[str, ...] = ()
    step: int = 0
    wrapping: Wrapping = field(default_factory=Wrapping)

    def in_words(self, total: int) -> str:
        """Return one line: the line of the script, the parameters and what is the matter."""
        listed = ", ".join(self.names[:_LISTED]) + (", ..." if len(self.names) > _LISTED else "")
        which = f"{len(self.names)} of {total} parameters ({listed}): " if self.names else ""
        by = f" (wrapped by {self.wrapping.api})" if self.wrapping.api else ""
        step = f", step {self.step + 1}" if self.step else ""
        place = self.wrapping.place
        line = f"{Path(place.file).name}:{place.line}: " if place.file else ""
        return f"{line}{which}{self.what}{step}{by}"


@dataclass
class Compared:
    """The parameters that were compared, how many of them were right in all steps, and findings."""

    total: int = 0
    wrong: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)

    @property
    def right(self) -> int:
        """Return the number of parameters without a finding."""
        return len(self.compared - self.wrong)

    def add(self, step: _Step, faults: Mapping[str, _Named]) -> None:
        """Record the faults of parameters: one finding for all of a fault that one line wrapped."""
        alike: dict[tuple[Fault, str, Wrapping], list[str]] = {}
        for name, (fault, what) in faults.items():
            same = "" if fault in (Fault.STALE, Fault.DIFFERENT) else what
            alike.setdefault((fault, same, step.wrapping(name)), []).append(name)
        for (fault, _, wrapping), names in alike.items():
            self.findings.append(Finding(fault, faults[names[0]][1], tuple(names), step.index, wrapping))
        self.wrong |= faults.keys()


def compare(pair: Pair) -> Compared:
    """Compare both runs step by step. Raises `CannotJudgeError` if they trained on different data."""
    sharded, reference = pair.sharded, pair.reference
    if not sharded.steps:
        return Compared(
            findings=[
                Finding(Fault.FAILS, f"{sharded.place}: fails sharded, and runs unsharded: {sharded.cause}")
            ]
        )
    both = [(sharded.records(step), reference.records(step)) for step in range(sharded.steps)]
    steps = [_Step(pair, step, *each) for step, each in enumerate(both) if all(each)]
    found = Compared(len({name for step in steps for name in step.trained}))
    for step, (records, _) in enumerate(both):
        counts = [len(each.losses) for each in records]
        if len(set(counts)) > 1:
            ranks = ", ".join(map(str, counts))
            what = f"ranks step apart: after {ranks} backwards, by rank; some skip a step that others take"
            found.findings.append(Finding(Fault.STEPS, what, step=step))
            return found
    if not steps:
        raise CannotJudgeError("the runs with and without sharding have no step in common")
    weights = weights_of(rank.held for rank in steps[0].sharded)
    apart = (Fault.APART, "ranks begin with different weights")
    found.add(steps[0], {name: apart for name, each in weights.items() if each.apart})
    if found.findings:
        return found
    read = [[rank.inputs for rank in step.sharded] for step in steps]
    if all(each[0] and len(set(each)) == 1 for each in read) and len(read[0]) > 1:
        found.findings.append(Finding(Fault.SAME_DATA, "all ranks read the same data in every step"))
    before: _Step | None = None
    for each in steps:
        each.require_same_data()
        _gradients(each, before, found)
        _loss(each, found)
        _clipping(each, found)
        _updates(each, pair, found)
        if found.findings:
            break  # what follows would only be its consequence
        before = each
    return found


class _Step:
    """One step of both runs."""

    def __init__(
        self, pair: Pair, step: int, sharded: Sequence[StepRecord], reference: Sequence[StepRecord]
    ) -> None:
        self.index, self.sharded, self.reference = step, sharded, reference
        first = reference[0]
        self.scale = 1.0 if pair.summed else 1 / pair.sharded.ranks
        self.mean: Mapping[str, torch.Tensor] = first.mean
        self.trained = sorted(first.mean)
        microbatches = len(first.local)
        self.share = tolerance(first.low, first.computes, len(self.reference), microbatches, first.summands)
        size = sum(float(each.square().sum()) for each in first.mean.values())
        self.floor = max(first.low, first.computes) * math.sqrt(
            size / max(1, sum(each.numel() for each in first.mean.values()))
        )

    def require_same_data(self) -> None:
        """Raise `CannotJudgeError` if a rank read other data in one of the runs."""
        for rank, (one, other) in enumerate(zip(self.sharded, self.reference, strict=True)):
            if one.inputs != other.inputs:
                raise CannotJudgeError(
                    f"rank {rank} reads other data with sharding than without, in step {self.index + 1}: "
                    "seed the loader by itself, as DistributedSampler(seed=...) does"
                )

    def known(self, name: str) -> Known:
        """Return the reference of a parameter."""
        first = self.reference[0]
        zero = torch.zeros_like(first.mean[name])
        local = [[each.get(name, zero) for each in rank.local] for rank in self.reference]
        return Known(first.mean[name], first.bound[name], local, self.scale, self.share, self.floor)

    def gradients(self, name: str) -> list[Piece | None]:
        """Return the gradients of all ranks of the sharded run."""
        return [rank.held[name].gradient if name in rank.held else None for rank in self.sharded]

    def read_gradients(self, name: str) -> list[Piece | None]:
        """Return the gradients that the optimizers read, by rank, without the factor of clipping."""
        found = [(rank.clipped or {}).get(name) for rank in self.sharded]
        factor = self.factor
        return [
            None if each is None else Piece(each.shape, each.offset, each.values.double() / factor, each.flat)
            for each in found
        ]

    @cached_property
    def factor(self) -> float:
        """Return what clipping and unscaling multiply right gradients by, of the largest such parameter; of
        the reference where none is right."""
        best, found = 0.0, None
        for name in self.trained:
            pieces = [each for each in self.gradients(name) if each is not None]
            size = float(self.mean[name].norm())
            if size > best and len(pieces) == len(self.sharded) and is_right(pieces, self.known(name)):
                before, after = whole(pieces), whole((each.clipped or {}).get(name) for each in self.sharded)
                if before is not None and after is not None:
                    best, found = size, _ratio(after.values, before.values)
        if found is None:
            name = max(self.trained, key=lambda each: float(self.mean[each].norm()))
            right = (self.reference[0].clipped or {}).get(name)
            found = 1.0 if right is None else _ratio(right.values, self.mean[name])
        return found or 1.0

    def wrapping(self, name: str) -> Wrapping:
        """Return the line that wrapped a parameter."""
        return self.sharded[0].wrapping.get(name, Wrapping())


def _gradients(step: _Step, before: _Step | None, found: Compared) -> None:
    held = [name for name in step.trained if any(name in rank.held for rank in step.sharded)]
    found.compared.update(held)
    faults = {name: _fault(step, before, name) for name in held}
    found.add(step, {name: fault for name, fault in faults.items() if fault is not None})


def _fault(step: _Step, before: _Step | None, name: str) -> _Named | None:
    """Return what is wrong with a parameter's gradient, None if nothing is."""
    pieces, known = step.gradients(name), step.known(name)
    present = [each for each in pieces if each is not None]
    if len(present) < len(pieces):
        some = f"on {len(pieces) - len(present)} of {len(pieces)} ranks" if present else "on any rank"
        return (Fault.NONE, f"no gradient {some}") if float(known.bound.norm()) > 0 else None
    if is_right(present, known) or not bool(torch.isfinite(known.mean).all()):
        return None
    later = [each for each in step.read_gradients(name) if each is not None]
    if len(later) == len(pieces) and not _alike(later, present):
        if is_right(later, known):
            return None  # reduced by the script itself
        present = later
    fault, what = explain(present, known, None if before is None else before.gradients(name))
    if fault is Fault.DIFFERENT:
        fault, what = _closer(step, before, name, what)
    return fault, f"gradient {what}"


def _alike(later: Sequence[Piece], before: Sequence[Piece]) -> bool:
    """Return whether the script only scaled gradients after backward."""
    return all(
        torch.allclose(one.values, other.values.double(), rtol=1e-3)
        for one, other in zip(later, before, strict=True)
        if one.values.shape == other.values.shape
    )


def _ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    size = float(other.double().square().sum())
    return float((one.double().reshape(other.shape) * other.double()).sum()) / size if size else 1.0


def _closer(step: _Step, before: _Step | None, name: str, what: str) -> _Named:
    """Return a better description of a gradient that is like no candidate."""
    for alias in (alias for alias, first in step.reference[0].aliases.items() if first == name):
        pieces = [rank.held[alias].gradient for rank in step.sharded if alias in rank.held]
        own = whole(step.gradients(name))
        other = whole(pieces) if len(pieces) == len(step.sharded) else None
        if own is not None and other is not None and not torch.equal(own.values, other.values):
            return Fault.TIED, f"without that of {alias}, which was the same tensor before wrapping"
    if before is not None:
        why = "computed with weights that are not the optimizer's last"
        return Fault.STALE, f"{what}, right in step 1: {why}"
    return Fault.DIFFERENT, what


def _loss(step: _Step, found: Compared) -> None:
    for rank, (one, other) in enumerate(zip(step.sharded, step.reference, strict=True)):
        pairs = list(zip(one.losses, other.losses, strict=False))
        wrong = next(((a, b) for a, b in pairs if not abs(a - b) <= step.share * max(abs(a), abs(b))), None)
        if wrong is not None and not any(each.fault is Fault.LOSS for each in found.findings):
            what = f"the loss of rank {rank} is {wrong[0]:.6g} sharded and {wrong[1]:.6g} unsharded"
            found.findings.append(Finding(Fault.LOSS, what, step=step.index))


def _clipping(step: _Step, found: Compared) -> None:
    ratios: dict[str, float] = {}
    for name in step.trained:
        got = whole((rank.clipped or {}).get(name) for rank in step.sharded)
        right = (step.reference[0].clipped or {}).get(name)
        if got is None or right is None or name in found.wrong:
            continue
        expected = right.values.double().reshape(got.values.shape)
        error, size = float((got.values.double() - expected).norm()), float(expected.norm())
        bound = float(step.reference[0].bound[name].norm()) / max(float(step.mean[name].norm()), 1e-300)
        if error > 2 * step.share * size * max(bound, 1.0) + 2 * step.floor * expected.numel() ** 0.5:
            ratios[name] = float((got.values.double() * expected).sum()) / max(size * size, 1e-300)
    if ratios:
        low, high = min(ratios.values()), max(ratios.values())
        between = f"{low:.3g}" if math.isclose(low, high, rel_tol=0.01) else f"{low:.3g} to {high:.3g}"
        what = f"gradient right before, and {between} times the unsharded one at optimizer.step(): clipping"
        found.add(step, dict.fromkeys(ratios, (Fault.CLIPPING, what)))


def _updates(step: _Step, pair: Pair, found: Compared) -> None:
    after = weights_of(rank.held for rank in pair.sharded.records(step.index + 1) or [StepRecord({})])
    path = pair.reference.folder / f"updated{step.index + 1}_rank0.pt"
    if not after or not path.exists():
        return
    updated = torch.load(path)
    now = weights_of(rank.held for rank in step.sharded)
    faults: dict[str, _Named] = {}
    for name in updated.keys() & after.keys() & now.keys() - found.wrong:
        trains = step.reference[0].held[name].trains or name not in step.sharded[0].optimized
        fault = _update(updated[name], now[name], after[name], trains)
        if fault is not None:
            faults[name] = fault
    found.add(step, dict(sorted(faults.items())))


def _update(right: torch.Tensor, now: Whole, after: Whole, trains: bool) -> _Named | None:
    """Return what is wrong with the weights after a step, None if nothing is."""
    if after.apart and not now.apart:
        return Fault.APART, "weights differ between ranks after the step"
    if not now.values.is_floating_point():
        return None
    moved = not torch.equal(now.values, after.values)
    if not trains:
        return (Fault.FROZEN, "frozen, and changed by the optimizer") if moved else None
    expected = right.double().reshape(after.values.shape)
    step = float((expected - now.values.double()).norm())
    error = float((after.values.double() - expected).norm())
    eps = torch.finfo(after.values.dtype).eps
    if error <= eps * (_NEAR * step + 2 * float(expected.norm())):
        return None
    if not moved:
        return Fault.NOT_OPTIMIZED, "has a gradient, and the optimizer does not change it"
    return Fault.UPDATE, f"weights after the step differ by {error / max(step, 1e-300):.2g} times the step"
