"""Recomputation of each block and resharding of each unit, under the memory less its prediction's error.

    corners   all blocks alike, with room ──> what each choice of a block costs in time and bytes
    program   `scipy.optimize.milp` ────────> how many blocks of each kind have which choice
    judge     simulates that exactly ───────> corrects the program's bytes, until it proposes nothing new
    around    neighbours, until none is faster and fits; the next batches of the list, likewise

Equal blocks differ in their place alone: those that recompute come first, where backward ends and little else
is held, and the units that stay gathered come last, where backward begins.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError
from fsdpbench.base.settings.values import Value, joined
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import Status
from fsdpbench.sweep.planning import not_applicable, without_absent, workload_named
from fsdpbench.sweep.prediction import usable_bytes
from fsdpbench.sweep.trials import with_room

RECOMPUTED = ("full", "op", "none")
"""The choices of a block, from the one that holds least."""
_GATHERED = {"SHARD_GRAD_OP": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD"}
"""Strategies that are others with all units gathered between forward and backward."""
_FAMILIES = 2
_ROUNDS = 6
_STEPS = (4, 1)
_MOST_KINDS = 3
_MARGIN = 0.003
"""The share of time and memory by which the program may err between neighbours."""

Judge = Callable[[Sequence[Config]], list[Candidate]]


@dataclass(frozen=True)
class Mix:
    """Blocks of each kind with each of `RECOMPUTED`, and last units that stay gathered after forward."""

    blocks: tuple[tuple[int, ...], ...]
    kept: int = 0


@dataclass(frozen=True)
class Family:
    """Configurations that differ in recomputation and resharding alone. `kinds`: of each block, in forward's
    order; `units`: those whose resharding is free, 0 where the system or its strategy decides it."""

    base: Config
    kinds: tuple[int, ...]
    units: int

    @property
    def sizes(self) -> list[int]:
        """Return the number of blocks of each kind."""
        return [self.kinds.count(kind) for kind in range(max(self.kinds) + 1)]

    def config(self, mix: Mix) -> Config:
        """Return the configuration of `mix`; what is alike for all is written as one value."""
        left = [
            [name for name, n in zip(RECOMPUTED, own, strict=True) for _ in range(n)] for own in mix.blocks
        ]
        values: dict[str, Value] = {
            "activation_checkpointing": _written([left[k].pop(0) for k in self.kinds])
        }
        if self.units and mix.kept:
            gathered = [True] * (self.units - mix.kept) + [False] * mix.kept
            values["reshard_after_forward"] = _written(gathered)
        return dataclasses.replace(self.base, settings=self.base.settings.changed(**values))

    def corners(self) -> list[Mix]:
        """Return: all blocks recomputed; one kind with each other choice; all units kept."""
        least = tuple((size, 0, 0) for size in self.sizes)
        found = [Mix(least)]
        for kind, size in enumerate(self.sizes):
            others = ((0, size, 0), (0, 0, size))
            found += [Mix((*least[:kind], choice, *least[kind + 1 :])) for choice in others]
        return [*found, Mix(least, self.units)] if self.units else found


def _written(each: Sequence[Value]) -> Value:
    return each[0] if len(set(each)) == 1 else joined(each)


@dataclass(frozen=True)
class Costs:
    """A linear model of [time, GiB]: of the first corner, and what a block of a kind, [kinds, choices, 2], or
    a kept unit adds. Times are of the goal's unit of work."""

    least: np.ndarray[Any, Any]
    blocks: np.ndarray[Any, Any]
    unit: np.ndarray[Any, Any]

    @classmethod
    def fitted(cls, family: Family, corners: Sequence[Candidate]) -> Costs:
        """Fit the model to the family's corners. Each has run."""
        figures = np.array([(1 / each.speed, _gib(each)) for each in corners])
        more = figures - figures[0]
        blocks = [
            [np.zeros(2), more[1 + 2 * kind] / size, more[2 + 2 * kind] / size]
            for kind, size in enumerate(family.sizes)
        ]
        unit = more[-1] / family.units if family.units else np.zeros(2)
        return cls(figures[0], np.array(blocks), unit)

    def of(self, mix: Mix) -> np.ndarray[Any, Any]:
        """Return [time, GiB] of `mix`."""
        return self.least + np.einsum("kc,kcf->f", np.array(mix.blocks), self.blocks) + mix.kept * self.unit

    def best(self, family: Family, gib: float) -> Mix | None:
        """Return the fastest mix within so many GiB, by integer programming; None: there is none."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes long to import

        count = len(RECOMPUTED)
        prices = np.vstack([self.blocks.reshape(-1, 2), self.unit])
        belongs = np.kron(np.eye(len(family.sizes)), np.ones(count))
        belongs = np.hstack([belongs, np.zeros((len(family.sizes), 1))])
        solved = milp(
            prices[:, 0] / self.least[0],
            integrality=np.ones(len(prices)),
            bounds=Bounds(0, [*np.repeat(family.sizes, count), family.units]),
            constraints=[
                LinearConstraint(belongs, family.sizes, family.sizes),
                LinearConstraint(prices[:, 1], -np.inf, gib - self.least[1]),
            ],
        )
        if solved.x is None:
            return None
        *blocks, kept = (round(x) for x in solved.x)
        of_kinds = zip(*[iter(blocks)] * count, strict=True)
        return Mix(tuple(of_kinds), kept)


def _gib(candidate: Candidate) -> float:
    return (candidate.memory or 0) / 2**30


@dataclass(frozen=True)
class Chosen:
    """The fastest uniform candidate whose memory suffices at the upper end of its interval (None: none does)
    and the fastest one by unit; how many were simulated for it, and the bytes that a GPU may reserve."""

    uniform: Candidate | None
    by_unit: Candidate
    simulated: int
    usable: int


def choose(tried: Sequence[Candidate], judge: Judge, memory: int | None) -> Chosen:
    """Choose by unit, starting from the uniform candidates in `tried`, under the GPU's memory or `memory`.

    Raises `BenchError` where no family of them can be chosen by unit, or nothing fits.
    """
    safe = [each for each in tried if is_safe(each)]
    uniform = max(safe, key=lambda each: each.speed, default=None)
    search = _Search(judge, memory)
    for batches, start in _families(tried):
        search.around(batches, start)
    if search.best is None:
        raise BenchError("--per-unit: no choice by unit fits safely: smaller batches or more GPUs may")
    by_unit = search.best if uniform is None or search.best.speed > uniform.speed else uniform
    return Chosen(uniform, by_unit, len(search.known), _usable(by_unit.config, memory))


def _usable(config: Config, memory: int | None) -> int:
    return min(each for each in (usable_bytes(config), memory) if each is not None)


def is_safe(candidate: Candidate) -> bool:
    """Return whether it ran, and memory suffices at the upper end of its interval."""
    return candidate.feasible and not candidate.risky


def _families(tried: Sequence[Candidate]) -> list[tuple[list[Family], int]]:
    """Return the families whose uniform candidates are fastest: one for each batch, and where to start."""
    found: dict[str, dict[int, tuple[Config, float]]] = {}
    for each in tried:
        base = _base_of(each.config)
        key = content_key(dataclasses.replace(base, settings=base.settings.changed(batch=1)))
        batches, batch = found.setdefault(key, {}), base.settings.batch
        speed = each.speed if is_safe(each) else 0.0
        batches[batch] = (base, max(speed, batches.get(batch, (base, 0.0))[1]))
    fastest = sorted(found.values(), key=lambda batches: -max(speed for _, speed in batches.values()))
    families = []
    for batches in fastest[:_FAMILIES]:
        ordered = sorted(batches)
        start = max(range(len(ordered)), key=lambda place: batches[ordered[place]][1])
        families.append(([family_of(batches[batch][0]) for batch in ordered], start))
    return families


def _base_of(config: Config) -> Config:
    settings = config.settings.changed(
        activation_checkpointing="full",
        checkpoint_first=None,
        reshard_after_forward=None,
        keep_last_unsharded=False,
        strategy=_GATHERED.get(config.settings.strategy, config.settings.strategy),
    )
    return without_absent(dataclasses.replace(config, settings=settings))


def family_of(base: Config) -> Family:
    """Return the family of a configuration. Raises `BenchError` for a model without blocks."""
    workload, wrap = workload_named(base), base.settings.wrap
    with torch.device("meta"):
        model = workload.build()
    alike: dict[tuple[str, int], int] = {}
    kinds = [
        alike.setdefault((type(module).__name__, sum(p.numel() for p in module.parameters())), len(alike))
        for module in model.modules()
        if isinstance(module, workload.block_classes)
    ]
    if not kinds:
        raise BenchError(f"--per-unit: {workload.name} has no blocks to choose for: leave it out")
    kinds = kinds if len(alike) <= _MOST_KINDS else [0] * len(kinds)
    free = base.settings.strategy in _GATHERED.values()
    free &= "reshard_after_forward" not in not_applicable(base, ("reshard_after_forward",))
    return Family(base, tuple(kinds), (workload.units(wrap) or 0) if free else 0)


class _Search:
    def __init__(self, judge: Judge, memory: int | None) -> None:
        self._judge = judge
        self._memory = memory
        self.known: dict[str, Candidate] = {}
        self.best: Candidate | None = None

    def around(self, families: Sequence[Family], start: int) -> None:
        """Search the family at `start`, then those beside it as long as they are faster."""
        self._search(families[start])
        for step in (1, -1):
            place = start + step
            while 0 <= place < len(families) and self._search(families[place]):
                place += step

    def _simulated(self, configs: Iterable[Config]) -> list[Candidate]:
        keys = {content_key(config): config for config in configs}
        new = [config for key, config in keys.items() if key not in self.known]
        self.known |= dict(zip(map(content_key, new), self._judge(new), strict=True))
        return [self.known[key] for key in keys]

    def _search(self, family: Family) -> bool:
        """Search one family; return whether it has a new best."""
        mixes, before = family.corners(), self.best
        if not_applicable(family.config(mixes[-1])):
            return False
        corners = self._simulated(with_room(family.config(mix)) for mix in mixes)
        if any(each.status is not Status.OK or not each.memory for each in corners):
            return False
        costs, gib = Costs.fitted(family, corners), self._limit(family.base, corners[0])
        found: dict[Mix, Candidate] = {}
        wrong = 0.0
        for _ in range(_ROUNDS):
            mix = costs.best(family, gib - wrong)
            if mix is None or mix in found or self._is_slower(costs.of(mix)[0]):
                break
            found[mix] = self._exact(family, mix)
            wrong = _gib(found[mix]) - costs.of(mix)[1]
        safe = [mix for mix, each in found.items() if is_safe(each)]
        if safe:
            self._improve(family, costs, gib, max(safe, key=lambda mix: found[mix].speed))
        return self.best is not before

    def _is_slower(self, time: float) -> bool:
        return self.best is not None and time > (1 + _MARGIN) / self.best.speed

    def _limit(self, base: Config, like: Candidate) -> float:
        """Return the GiB of which the upper end of the interval is all that may be reserved."""
        size = like.memory or 1
        low: float = like.interval["peak_memory_bytes"]["reserved"][0] if like.interval else size
        return _usable(base, self._memory) * low / size / 2**30

    def _exact(self, family: Family, mix: Mix) -> Candidate:
        """Simulate `mix`; its memory with room where it runs out."""
        config = family.config(mix)
        (found,) = self._simulated([config])
        if is_safe(found) and (self.best is None or found.speed > self.best.speed):
            self.best = found
        if found.memory is None or found.status is not Status.OK:
            (roomy,) = self._simulated([with_room(config)])
            return dataclasses.replace(found, memory=roomy.memory)
        return found

    def _improve(self, family: Family, costs: Costs, gib: float, mix: Mix) -> None:
        """Go to the fastest neighbour as long as there is a faster one that fits."""
        now, moved = self._exact(family, mix), True
        while moved:
            moved = False
            error = np.array([1 / now.speed, _gib(now)]) - costs.of(mix)
            likely = []
            for moves, other in _neighbours(family, mix):
                time, size = costs.of(other) + error
                margin = _MARGIN if moves == 1 else 0.0
                if time * now.speed < 1 + margin and size < (1 + margin) * gib:
                    likely.append((time, other))
            for _, other in sorted(likely, key=lambda each: each[0]):
                found = self._exact(family, other)
                if is_safe(found) and found.speed > now.speed:
                    now, mix, moved = found, other, True
                    break


def _neighbours(family: Family, mix: Mix) -> Iterator[tuple[int, Mix]]:
    """Yield mixes around one, each once, with the moves to it: 1, or 2 of single blocks or units."""
    seen = {mix}
    for step in _STEPS:
        for other in _moved(family, mix, step):
            if other not in seen:
                seen.add(other)
                yield 1, other
    for other in _moved(family, mix, 1):
        for further in _moved(family, other, 1):
            if further not in seen:
                seen.add(further)
                yield 2, further


def _moved(family: Family, mix: Mix, step: int) -> Iterator[Mix]:
    """Yield the mixes with so many blocks of one kind changed, or so many more or fewer units kept."""
    for kind, own in enumerate(mix.blocks):
        for one, other in itertools.permutations(range(len(own)), 2):
            if own[one] >= step:
                changed = [n - step * (i == one) + step * (i == other) for i, n in enumerate(own)]
                yield Mix((*mix.blocks[:kind], tuple(changed), *mix.blocks[kind + 1 :]), mix.kept)
    for kept in (mix.kept - step, mix.kept + step):
        if 0 <= kept <= family.units:
            yield Mix(mix.blocks, kept)
