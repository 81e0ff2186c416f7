"""Part 1 of a proof: compare gradients, losses and weights of the sharded script with the unsharded one."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fsdpbench.answers.prove.matching import (
    NOISE,
    Known,
    cut,
    distance_of,
    explain,
    is_right,
    reduction,
    tolerance,
)
from fsdpbench.answers.prove.real_runs import Pair, RealRun, merged
from fsdpbench.answers.prove.verdict import shown
from fsdpbench.base.errors import CannotJudgeError, error_text
from fsdpbench.script.real_ranks.loss_divisors import of_the_largest, parted, uneven
from fsdpbench.script.real_ranks.pieces import Piece, Whole, weights_of, whole
from fsdpbench.script.real_ranks.watching import OTHER, StepRecord, Wrapping

_Finding = tuple[str, list[str], int, Wrapping]
_Faults = Mapping[str, str]
"""Description of the fault by parameter; under "" if it belongs to no parameter. """
_NEAR = 64
"""Tolerance of an update in machine epsilons: a few dozen elementwise operations."""
_DOUBTFUL = re.compile(r"differs by|times as large|times the unsharded one|the loss of rank")
"""Findings that rounding could cause; it cannot make a gradient equal another rank's."""
_NOT_MOVED = "has a gradient, and the optimizer does not change it"
_SIZE = re.compile(r"\d\S{0,40}(?= times)")


@dataclass
class Compared:
    """The result of a comparison: `trained` parameters, the `compared` ones, those with a finding (`wrong`),
    and findings: (fault, parameters, step, script line that wrapped them). Rounding would hide faults of
    `hidden` ones. `epsilon`: machine epsilon of the coarsest dtype of layers (float32: 1.2e-7)."""

    trained: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    findings: list[_Finding] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    epsilon: float = 0.0
    hook: str = ""
    """The script line of a custom hook that communicates gradients."""
    of_sums: bool = False
    """Whether losses are not divided by anything; then gradients may be summed over ranks or averaged."""

    @property
    def may_be_compressed(self) -> bool:
        """Return whether such a hook may have lost parts of gradients on purpose."""
        what = [what for what, *_ in self.findings]
        differs = any("gradient differs by" in each for each in what)
        return bool(self.hook) and differs and all(map(_DOUBTFUL.search, what))

    @property
    def may_be_summed(self) -> bool:
        """Return whether the only finding is that gradients of sums are not averaged."""
        what = [what for what, *_ in self.findings]
        return self.of_sums and bool(what) and all("not divided by the" in each for each in what)

    @property
    def keeps_own(self) -> bool:
        """Return whether no gradient is reduced."""
        return self.wrong == self.trained and all(
            "each rank keeps its own" in what for what, *_ in self.findings
        )

    @property
    def is_doubtful(self) -> bool:
        """Return whether rounding may explain a finding."""
        return self.epsilon > 1e-6 and any(_DOUBTFUL.search(what) for what, *_ in self.findings)

    def add(self, step: "_Step", faults: _Faults, line: str = "") -> None:
        """Record the faults of parameters: one finding for all parameters with the same fault and line."""
        alike: dict[tuple[str, Wrapping], list[str]] = {}
        for name, what in faults.items():
            wrapping = Wrapping(line) if line else step.wrapping(name)
            alike.setdefault((_SIZE.sub("", what), wrapping), []).append(name)
        for (_, wrapping), names in alike.items():
            self.findings.append((faults[names[0]], names, step.index, wrapping))
        self.wrong |= faults.keys()

    def add_kept(self, names: list[str], line: str) -> None:
        """Record that ranks keep other values in `names`, if there are any."""
        what = error_text("gradients.kept", shown(names)) if names else ""
        self.findings += [(what, [""], 0, Wrapping(line))] * bool(names)

    def lines(self) -> list[str]:
        """Return the findings as text: the script line, the parameters and the fault."""
        found = []
        for what, names, step, wrapping in self.findings:
            which = f"{len(names)} of {len(self.trained)} parameters ({shown(names)}): " if names[0] else ""
            line = f"{wrapping.place}: " if wrapping.place else ""
            how = f" ({wrapping.how})" if names[0] and wrapping.how else ""
            found.append(f"{line}{which}{what}{f', step {step + 1}' if step else ''}{how}")
        return found


def compare(pair: Pair) -> Compared:
    """Compare both runs step by step until a step has a finding; later differences only follow from it.
    Raises `CannotJudgeError` if the runs trained on different data."""
    found, every = Compared(), [_Step(pair, index) for index in range(pair.sharded.steps)]
    for step in every:
        counts = [len(each.losses) for each in step.sharded]
        if len(set(counts)) > 1 and not step.is_ended:
            after = f"after {', '.join(map(str, counts))} backwards, by rank"
            found.add(step, {"": f"ranks step apart: {after}; some skip a step that others take"})
            return found
    steps = [step for step in every if step.reference and not step.is_ended]
    if not steps:
        raise CannotJudgeError("the runs with and without sharding have no step in common")
    found.trained = {name for step in steps for name in step.mean}
    found.epsilon = max(step.first.computes for step in steps)
    found.hook = max(rank.hook for step in steps for rank in step.sharded)
    terms = [term for step in steps for each in step.first.divided for term in each.terms.values()]
    found.of_sums = bool(terms) and max(abs(term.divisor) for term in terms) <= 1
    noise = _noise(steps, pair)
    weights = weights_of(rank.held for rank in steps[0].sharded)
    differ = "ranks begin with different weights"
    found.add(steps[0], {name: differ for name, each in weights.items() if each.apart})
    if found.findings:
        if all(name.startswith(OTHER) for name in found.wrong):
            raise CannotJudgeError(error_text("gradients.own_tensors"))
        steps[0].require_whole_model(found.wrong)
        return found
    found.findings += [*_wrong_by_itself(steps), *itertools.islice(_unequal_means(steps), 1)]
    found.add(steps[0], {**_lost(steps), **_of_no_optimizer(steps[0])})
    for step, before in zip(steps, [None, *steps], strict=False):
        step.require_same_data()
        if names := merged(step.sharded[0], step.first):
            found.add(step, dict.fromkeys(names, error_text("gradients.merged")), step.sharded[0].made)
            break
        step.noise, step.hidden, step.of_sums = noise, found.hidden, found.of_sums
        found.compared |= set(step.held)
        wrong = {name: what for name in step.held if (what := _gradient(step, before, name))}
        if any(each.follows for each in step.reference):
            found.add(step, dict.fromkeys(wrong, error_text("gradients.gathered")), pair.dropped)
        else:
            found.add(step, wrong)
        known = found.wrong | (step.mean.keys() - set(step.held))
        for check in (_losses, _clipping, _updates):
            found.add(step, {name: what for name, what in check(step).items() if name not in known})
        if found.findings:
            step.require_replicas(found)
            break
    if not found.findings:
        _require_seen(found, every, steps, pair)
    return found


def _require_seen(found: Compared, every: "Sequence[_Step]", steps: "Sequence[_Step]", pair: Pair) -> None:
    """Raise `CannotJudgeError` if `steps`, the compared ones of `every`, do not represent the training."""
    if any(len({each.clipped is None for each in step.sharded}) > 1 for step in every):
        raise CannotJudgeError("ranks take different numbers of steps, as join() lets them")
    if steps[-1].sharded[0].waits and not pair.sharded.failure:
        raise CannotJudgeError(f"an optimizer takes no step in the first {len(steps)}")
    if not found.trained:
        raise CannotJudgeError(error_text("gradients.unseen"))


def _wrong_by_itself(steps: "Sequence[_Step]") -> Iterator[_Finding]:
    """Yield faults that do not need the reference, because the unsharded script may have them too."""
    first = steps[0].sharded
    loader, place = Wrapping(first[0].loader or first[0].place), Wrapping(first[0].place)
    if which := _readers_of_the_same(steps):
        yield f"{which} read the same data in every step", [""], 0, loader
    if len({each.order for each in first if each.order}) > 1:
        yield error_text("gradients.orders"), [""], 0, loader
    for step in steps if not any(each.splits for each in first) else ():
        facts = [each.facts for each in step.sharded]
        if apart := [name for name in facts[0] if len({each.get(name) for each in facts}) > 1]:
            yield error_text("gradients.facts", shown(apart)), [""], step.index, place
            break
    if line := next((each.scaled_clip for step in steps for each in step.sharded if each.scaled_clip), ""):
        yield error_text("gradients.scaled_clip"), [""], 0, Wrapping(line)


def _unequal_means(steps: "Sequence[_Step]") -> Iterator[_Finding]:
    """Yield findings on losses that are means over different numbers of elements, or over the largest one, or
    whose parts weigh more on some ranks than on others."""
    if found := parted([[each.divided for each in step.sharded] for step in steps]):
        yield error_text("gradients.parted", max(found[1])), [""], 0, Wrapping(found[0])
    for step in steps:
        every = [each.divided for each in step.sharded]
        for numbers in filter(None, (of_the_largest(every, each) for each in step.sharded[0].largest)):
            what = error_text("gradients.largest_count", max(numbers), sum(numbers))
            yield what, [""], step.index, Wrapping(every[0][0].lines.partition(" ")[0])
        if means := uneven(itertools.chain.from_iterable(every)):
            what = error_text("gradients.unequal_means", min(means[1]), max(means[1]))
            yield what, [""], step.index, Wrapping(means[0])


def _lost(steps: "Sequence[_Step]") -> _Faults:
    """Return the parameters whose update is lost in every step: the next step starts with the old values."""
    changed = ({name for each in step.after for name in each.changed} for step in steps if step.after)
    every = [names - step.moved for names, step in zip(changed, steps, strict=False)]
    return dict.fromkeys(sorted(set.intersection(*every) if every else ()), error_text("gradients.lost"))


def _of_no_optimizer(step: "_Step") -> _Faults:
    """Return the parameters that no rank's optimizer has, where each rank's has some of all."""
    own = {rank.optimized for rank in step.sharded}
    left = step.mean.keys() - frozenset().union(*own) if len(own) > 1 else set[str]()
    return dict.fromkeys(sorted(left), error_text("gradients.of_no_optimizer"))


def require_apart(run: RealRun, since: int, most: int) -> None:
    """Raise `CannotJudgeError` if ranks keep their own gradients from step `since` on but have equal weights
    again before step `most`: then the script averages weights instead."""
    first = weights_of(rank.held for rank in run.records(since))
    for step in range(since + 1, most):
        now = weights_of(rank.held for rank in run.records(step))
        both = [(now[name], first[name]) for name in now.keys() & first.keys()]
        moved = [one for one, other in both if not torch.equal(one.values, other.values)]
        if moved and not any(each.apart for each in moved):
            raise CannotJudgeError(error_text("gradients.averages", step))


def _readers_of_the_same(steps: "Sequence[_Step]") -> str:
    """Return the ranks that read the same data and have the same losses in every step, as text; empty if
    none do. Some ranks may do so if a mesh or groups could split the model."""
    alike: dict[str, list[int]] = {}
    for rank, own in enumerate(zip(*(step.sharded for step in steps), strict=True)):
        read = [f"{each.inputs} {each.losses}" for each in own if each.inputs]
        alike.setdefault(" ".join(read) or f"{rank}", []).append(rank)
    most = max(alike.values(), key=len)
    if len(most) < 2 or (len(alike) > 1 and (len(steps) == 1 or steps[0].sharded[0].grouped)):
        return ""
    return "all ranks" if len(alike) == 1 else f"ranks {' and '.join(map(str, most))}"


class _Step:
    """One step of both runs. `after`: the sharded run's next records; `updated`: the reference's weights
    after its optimizer step."""

    def __init__(self, pair: Pair, index: int) -> None:
        self.index = index
        self.sharded, self.after = pair.sharded.records(index), pair.sharded.records(index + 1)
        if len({each.clipped is None for each in self.after}) > 1:
            self.after = []  # a rank that ends before the others may receive their last weights
        self.reference, self.updated = pair.reference.records(index), pair.reference.updated(index + 1)
        self.by_hand = any(each.by_hand for each in self.sharded)
        self.votes = max(each.votes for each in (*self.sharded, *self.after))
        self.reduces = any(each.reduces for each in self.after)
        """Whether optimizers reduce gradients in their step; then only weights can be compared."""
        self.scale, self.is_multiplied = pair.task.scale, pair.power > 0
        first = self.reference[0] if self.reference else StepRecord({})
        self.first, self.mean = first, first.mean
        self.own_share = tolerance(first.computes, first.summands)  # tolerance without reduction
        low = max([first.low, *(each.low for each in self.sharded)])
        share, absolute = reduction(low, pair.sharded.ranks, max(1, len(first.local)))
        self.share = self.own_share + share
        size = sum(float(each.square().sum()) for each in self.mean.values())
        count = max(1, sum(each.numel() for each in self.mean.values()))
        self.floor = first.computes * math.sqrt(size / count) + absolute
        self.noise: Mapping[str, torch.Tensor] = {}
        self.hidden: set[str] = set()
        self.of_sums = False

    @cached_property
    def held(self) -> list[str]:
        """Return the trained parameters of the sharded run, except those that the script computes from other
        tensors. Raises `CannotJudgeError` if none is left."""
        found = sorted(self.mean.keys() & {name for rank in self.sharded for name in rank.held})
        own = [name for name in found if any(name in rank.optimized for rank in self.sharded)]
        others = [name for name in found if name not in own]
        moved = [name for name in others if name in self.moved]
        if moved and not own:
            raise CannotJudgeError(f"an optimizer has other tensors, of which the script makes {moved[0]}")
        return own if moved else found

    @cached_property
    def moved(self) -> set[str]:
        """Return the parameters that have other values at the beginning of the next step."""
        now, after = (weights_of(rank.held for rank in each) for each in (self.sharded, self.after))
        both = now.keys() & after.keys()
        return {name for name in both if not torch.equal(now[name].values, after[name].values)}

    @property
    def is_ended(self) -> bool:
        """Return whether a rank's script ended before this step."""
        return any(each.clipped is None for each in self.sharded)

    def require_same_data(self) -> None:
        """Raise `CannotJudgeError` if a rank read different data in the two runs."""
        for rank, (one, other) in enumerate(zip(self.sharded, self.reference, strict=True)):
            if one.inputs != other.inputs:
                raise CannotJudgeError(error_text("gradients.other_data", rank, self.index + 1))

    def require_whole_model(self, apart: Iterable[str]) -> None:
        """Raise `CannotJudgeError` if the script itself splits its model among ranks (the same data then give
        the same losses), or if every weight that is `apart` equals one of another name on the first rank."""
        alike = len({f"{rank.inputs} {rank.losses}" for rank in self.sharded}) == 1
        if alike or any(rank.splits for rank in self.sharded):
            raise CannotJudgeError("the script itself splits its model among ranks, whose weights differ")
        first, *others = (rank.held for rank in self.sharded)
        known = [each.weight.values for each in first.values()]
        parts = [rank[name].weight.values for rank in others for name in apart if name in rank]
        if all(any(torch.equal(part, each) for each in known) for part in parts):
            raise CannotJudgeError("ranks begin with the same weights, under other names")

    def require_replicas(self, found: Compared) -> None:
        """Raise `CannotJudgeError` if differing gradients depend on integers that the script communicates, or
        may belong to the ranks' parts of a model, which begin alike."""
        if self.votes and any(re.search("differ|keeps its own", what) for what, *_ in found.findings):
            raise CannotJudgeError(error_text("gradients.votes", self.votes))
        for what, names, _, wrapping in found.findings if any(each.splits for each in self.sharded) else ():
            if "its own" in what and not wrapping.how:
                raise CannotJudgeError(error_text("gradients.parts", shown(names)))

    def known(self, name: str) -> Known:
        """Return the reference of a parameter."""
        zero = torch.zeros_like(self.mean[name])
        local = [[each.get(name, zero) for each in rank.local] for rank in self.reference]
        return Known(self.mean[name], self.first.bound[name], local, self.scale, self.share, self.floor)

    def gradients(self, name: str) -> list[Piece | None]:
        """Return the gradients of all ranks of the sharded run."""
        return [rank.held[name].gradient if name in rank.held else None for rank in self.sharded]

    def reduced(self, name: str) -> Whole | None:
        """Return the gradient after the last backward if it is correct on all ranks, else None."""
        pieces = [each for each in self.gradients(name) if each is not None]
        is_whole = len(pieces) == len(self.sharded) and is_right(pieces, self.known(name))
        return whole(pieces) if is_whole else None

    def read(self, name: str) -> Whole | None:
        """Return the gradient that the sharded run's optimizers read."""
        return whole((rank.clipped or {}).get(name) for rank in self.sharded)

    def reads_alike(self, name: str, share: float) -> bool:
        """Return whether the gradients that the optimizers of both runs read differ by at most `share`."""
        got, right = self.read(name), (self.first.clipped or {}).get(name)
        if got is None or right is None or got.apart:
            return False
        expected = right.values.double().reshape(got.values.shape)
        error, size = float((got.values.double() - expected).norm()), float(expected.norm())
        bound = float(self.first.bound[name].norm()) / max(float(self.mean[name].norm()), 1e-300)
        return error <= 2 * share * size * max(bound, 1.0) + 2 * self.floor * expected.numel() ** 0.5

    def scales(self, name: str) -> bool:
        """Return whether the script at most scales a gradient between backward and the optimizer."""
        before, read = whole(self.gradients(name)), self.read(name)
        if before is None or read is None or before.apart:
            return False
        scaled = before.values.double() * _ratio(read.values, before.values)
        return float((read.values.double() - scaled).norm()) <= 1e-3 * float(scaled.norm())

    def read_gradients(self, name: str, factor: float) -> list[Piece]:
        """Return the gradients that the optimizers read, by rank, divided by the `factor` of clipping."""
        found = [(rank.clipped or {}).get(name) for rank in self.sharded]
        return [replace(each, values=each.values.double() / factor) for each in found if each is not None]

    def compensates(self, name: str) -> bool:
        """Return whether the script scales a gradient after backward so that it becomes correct."""
        read = self.read_gradients(name, 1.0) if self.factor > 1.5 or self.is_multiplied else []
        before = self.gradients(name)
        clips = [(rank.unclipped or rank.clipped or {}).get(name) for rank in self.sharded]
        if not self.by_hand and None not in (*before, *clips):
            held = [each for each in before if each is not None]
            read = read if is_right(held, self.known(name)) else [each for each in clips if each is not None]
        return len(read) == len(self.sharded) and is_right(read, self.known(name))

    @cached_property
    def factor(self) -> float:
        """Return the factor of clipping and unscaling, from the largest parameter with a correct gradient;
        from the reference if none is correct."""
        for name in sorted(self.mean, key=lambda each: -float(self.mean[each].norm())):
            before, after = self.reduced(name), self.read(name)
            if before is not None and after is not None:
                return _ratio(after.values, before.values) or 1.0
        name = max(self.mean, key=lambda each: float(self.mean[each].norm()))
        read = (self.first.clipped or {}).get(name)
        ratio = _ratio(read.values, self.mean[name]) if read is not None else 1.0
        is_mean = any(term.count > 1 for each in self.first.divided for term in each.terms.values())
        return 1.0 if is_mean and self.scale < 1 < ratio / 1.5 else ratio or 1.0  # a mean must not grow

    def require_no_divisor(self, name: str) -> None:
        """Raise `CannotJudgeError` if the script itself divides a gradient by a multiple of the ranks."""
        clips = [(rank.unclipped or rank.clipped or {}).get(name) for rank in self.sharded]
        before, after = whole(self.gradients(name)), whole(clips)
        if before is not None and after is not None and not before.apart and self.scales(name):
            times = 1 / (_ratio(after.values, before.values) * len(self.sharded) or 1.0)
            if times > 0.5 and abs(times - round(times)) < 0.01:
                raise CannotJudgeError(error_text("gradients.divisor", times * len(self.sharded)))

    def adds_again(self, name: str) -> bool:
        """Return whether the script sums correct gradients over ranks again without dividing them."""
        before, read = self.reduced(name) if self.by_hand else None, self.read(name)
        if before is None or read is None:
            return False
        times = _ratio(read.values, before.values) / len(self.sharded)
        return abs(times - 1) < 0.01 and self.scales(name)

    def wrapping(self, name: str) -> Wrapping:
        """Return the script line that wrapped a parameter, or else the line of the optimizer step."""
        return self.sharded[0].wrapping.get(name) or Wrapping(self.sharded[0].place)


def _gradient(step: _Step, before: _Step | None, name: str) -> str:
    """Describe what is wrong with a parameter's gradient; empty if it is correct."""
    pieces, known = step.gradients(name), step.known(name)
    present = [each for each in pieces if each is not None]
    if len(present) < len(pieces):
        some = f"on {len(pieces) - len(present)} of {len(pieces)} ranks" if present else "on any rank"
        return f"no gradient {some}" if float(known.bound.norm()) > 0 else ""
    if step.reduces or is_right(present, known) or not bool(torch.isfinite(known.mean).all()):
        return ""
    if step.compensates(name):
        return ""
    later = step.read_gradients(name, step.factor)
    if len(later) == len(pieces) and not _alike(later, present):
        scales = step.scales(name)
        if not step.by_hand and not scales and step.reads_alike(name, step.share):
            return ""  # computed from correct gradients
        if is_right(later, known):  # the script reduces it itself, or scales it to one norm
            what = explain(present, known, None) if scales and not step.by_hand else ""
            return f"gradient {what}" if "divided by the" in what else ""
        present = present if scales else later
    what = explain(present, known, None if before is None else before.gradients(name))
    if not what and present is later and step.reads_alike(name, step.share):
        raise CannotJudgeError(f"the script itself reduces gradients and changes them, such as {name}'s")
    if "not divided by the" in what and step.is_multiplied:
        return f"gradient {len(pieces)} times as large: the loss is multiplied by the number of ranks"
    if "not divided by the" in what and not step.of_sums:
        step.require_no_divisor(name)
    what = what or _unlike(step, before, name, distance_of(present, known))
    if name in step.noise and _DOUBTFUL.search(what):
        sizes = [(cut(step.noise[name], each).norm(), cut(known.bound, each).norm()) for each in present]
        share = max(float(noise / size.clamp(1e-300)) for noise, size in sizes)
        if is_right(present, replace(known, tolerance=NOISE * share + known.tolerance)):
            least = float(known.mean.norm()) / max(2, len(known.local[0]))  # a missing microbatch
            step.hidden |= {name} if NOISE * float(step.noise[name].norm()) > least else set()
            return ""
    return f"gradient {what}"


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


def _unlike(step: _Step, before: _Step | None, name: str, distance: float) -> str:
    """Describe a gradient that matches no candidate."""
    clips = [(rank.unclipped or {}).get(name) for rank in step.sharded] if step.by_hand else []
    clipped = [each for each in clips if each is not None]
    if len(clipped) == len(step.sharded) and "its own" in explain(clipped, step.known(name), None):
        return "clipped by each rank, before those of other ranks are added"
    for alias in (alias for alias, first in step.first.aliases.items() if first == name):
        pieces = [rank.held[alias].gradient for rank in step.sharded if alias in rank.held]
        own = whole(step.gradients(name))
        other = whole(pieces) if len(pieces) == len(step.sharded) else None
        if own is not None and other is not None and not torch.equal(own.values, other.values):
            return f"without that of {alias}, which was the same tensor before wrapping"
    return error_text("gradients.differs", distance) + error_text("gradients.stale") * (before is not None)


def _noise(steps: Sequence[_Step], pair: Pair) -> dict[str, torch.Tensor]:
    """Return the largest changes by perturbed weights in a step: of gradients and, under "", of a loss."""
    most: dict[str, torch.Tensor] = {}
    if pair.moved is None:
        return most
    for step in steps:
        changes: dict[str, torch.Tensor] = {}
        for one, other in zip(step.reference, pair.moved.records(step.index), strict=True):
            losses = [{"": torch.tensor(each.losses).sum()} for each in (one, other)]
            for before, after in [*zip(one.local, other.local, strict=False), losses]:
                for name in before.keys() & after.keys():
                    change = (after[name] - before[name]).abs().nan_to_num(math.inf) * step.scale
                    changes[name] = changes.get(name, 0) + change
        most |= {name: torch.maximum(most.get(name, change), change) for name, change in changes.items()}
    return most


def _losses(step: _Step) -> _Faults:
    for rank, (one, other) in enumerate(zip(step.sharded, step.reference, strict=True)):
        for a, b in zip(one.losses, other.losses, strict=False):
            allowed = NOISE * float(step.noise.get("", 0)) + step.own_share * max(abs(a), abs(b))
            if a != b and not abs(a - b) <= allowed and not (math.isnan(a) and math.isnan(b)):
                return {"": f"the loss of rank {rank} is {a:.6g} sharded and {b:.6g} unsharded"}
    return {}


def _clipping(step: _Step) -> _Faults:
    ratios: dict[str, float] = {}
    loud = [step.noise[name].norm() / step.mean[name].norm() for name in step.mean if name in step.noise]
    share = step.share + NOISE * max(map(float, loud), default=0.0)
    for name in step.mean if not step.reduces else ():
        got, right = step.read(name), (step.first.clipped or {}).get(name)
        if got is None or right is None or step.compensates(name):
            continue
        if step.adds_again(name):
            return {name: error_text("gradients.added_again", len(step.sharded))}
        if not step.reads_alike(name, share):
            ratios[name] = _ratio(got.values, right.values.reshape(got.values.shape))
    low, high = min(ratios.values(), default=1.0), max(ratios.values(), default=1.0)
    alike = math.isclose(low, high, rel_tol=0.01)
    if alike and ratios.keys() >= set(step.held) and any(rank.gathers for rank in step.sharded):
        raise CannotJudgeError("the script multiplies gradients by what it gathers from shards")
    between = f"{low:.3g}" if alike else f"{low:.3g} to {high:.3g}"
    what = f"gradient right before, and {between} times the unsharded one at optimizer.step(): clipping"
    return dict.fromkeys(ratios, what)


def _updates(step: _Step) -> _Faults:
    now, after = (weights_of(rank.held for rank in each) for each in (step.sharded, step.after))
    faults: dict[str, str] = {}
    for name in sorted(step.updated.keys() & after.keys() & now.keys()):
        untouched = name not in step.sharded[0].optimized or step.read(name) is None
        trains = step.first.held[name].trains or untouched
        if what := _update(step.updated[name], now[name], after[name], trains):
            # Without a gradient it may be a teacher that the script itself averages.
            is_own = what == _NOT_MOVED and name not in step.mean
            faults[name] = error_text("gradients.not_followed") if is_own else what
    return faults


def _update(right: torch.Tensor, now: Whole, after: Whole, trains: bool) -> str:
    """Describe what is wrong with the weights after a step; empty if they are correct."""
    if after.apart and not now.apart:
        return "weights differ between ranks after the step"
    if not now.values.is_floating_point():
        return ""
    moved = not torch.equal(now.values, after.values)
    if not trains:
        return "frozen, and changed by the optimizer" if moved else ""
    expected = right.double().reshape(after.values.shape)
    step = float((expected - now.values.double()).norm())
    error = float((after.values.double() - expected).norm())
    eps = torch.finfo(after.values.dtype).eps
    if error <= eps * (_NEAR * step + 2 * float(expected.norm())):
        return ""
    if not moved:
        return _NOT_MOVED
    return f"weights after the step differ by {error / max(step, 1e-300):.2g} times the step"
