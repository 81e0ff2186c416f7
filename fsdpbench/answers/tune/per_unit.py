"""Choose recomputation and offload of each block and resharding of each unit, within memory minus its error.

    corners   all blocks alike, with enough memory ──> cost of each choice of a block in time and bytes
    program   `scipy.optimize.milp` ─────────────────> number of blocks of each kind with each choice
    judge     simulates the result exactly ──────────> corrects the program, until it proposes nothing new
    around    tries neighbours that may beat the best; other batches, if the program predicts more
    units     of the best: one block or two per unit, and prefetch distance, until nothing is faster

The search starts with the best uniform candidate of all batches, so the result is never slower. Of equal
blocks, those that recompute come first, where backward ends and little other memory is held, and units that
stay gathered come last, where backward begins. Full offload is spread out, to balance the link to the host.
"""

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.base.settings.values import Value, is_mixed, joined, spread, unit_sizes
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import Status
from fsdpbench.sweep.planning import not_applicable, without_absent, workload_named
from fsdpbench.sweep.prediction import usable_bytes
from fsdpbench.sweep.trials import with_room

CHOICES = (("full", False), ("full", True), ("op", False), ("none", False), ("none", True))
"""The choices of a block: (what it recomputes, whether its saved tensors are offloaded)."""
_THIN, _KEEPS_ALL, _OFFLOADS_ALL = 1, 3, 4
_IN_ORDER = (_THIN, 0, 2, _KEEPS_ALL)
"""The order of blocks of a kind. Blocks that offload everything are spread among those after the thin ones,
because the next block that offloads anything waits for their copy."""
_GATHERED = {"SHARD_GRAD_OP": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD"}
"""Strategies that equal another one with all units gathered between forward and backward."""
_FAMILIES, _SEARCHED, _ROUNDS, _TRIES = 2, 3, 6, 6
"""_TRIES: maximum number of consecutive simulated neighbours without an improvement."""
_LESS = 0.8
"""If a step waits for the link to the host, the modelled time of the link is reduced by this factor."""
_NEAR = 0.99
"""A family is searched if it reaches at least this share of the best speed."""
_STEPS, _MOST_KINDS = (4, 1), 3
_IN_VAIN = 2
"""Maximum number of consecutive changes of one unit setting without an improvement."""
_MARGIN = 0.001
"""The relative error of the program between neighbours; prefetch must gain more than this."""

Judge = Callable[[Sequence[Config]], list[Candidate]]


@dataclass(frozen=True)
class Mix:
    """Number of blocks of each kind with each of `CHOICES`, and of last units that stay gathered (`kept`)."""

    blocks: tuple[tuple[int, ...], ...]
    kept: int = 0

    def apart(self, other: "Mix") -> int:
        """Return the number of blocks and units that differ; each changed block counts twice."""
        pairs = zip(itertools.chain(*self.blocks), itertools.chain(*other.blocks), strict=True)
        return sum(abs(one - its) for one, its in pairs) + abs(self.kept - other.kept)


@dataclass(frozen=True)
class Family:
    """Configurations that differ only in recomputation, offload and resharding. `kinds`: of each block, in
    forward order; `units`: number with a free choice of resharding, 0 if the system or strategy fixes it;
    `offloads`: whether blocks may offload; `selects`: whether they may recompute only some operators."""

    base: Config
    kinds: tuple[int, ...]
    units: int
    offloads: bool = False
    selects: bool = True

    @property
    def sizes(self) -> list[int]:
        """Return the number of blocks of each kind."""
        return [self.kinds.count(kind) for kind in range(max(self.kinds) + 1)]

    def config(self, mix: Mix) -> Config:
        """Return the configuration of `mix`. A setting that is equal for all blocks is a single value."""
        recomputed, moved = self.of_blocks(mix)
        values: dict[str, Value] = {"activation_checkpointing": written(recomputed)}
        if any(moved):
            values["activation_offload"] = written(moved)
        if self.units and mix.kept:
            gathered = [True] * (self.units - mix.kept) + [False] * mix.kept
            values["reshard_after_forward"] = written(gathered)
        return dataclasses.replace(self.base, settings=self.base.settings.changed(**values))

    def of_blocks(self, mix: Mix) -> tuple[tuple[str, ...], tuple[bool, ...]]:
        """Return the recomputation and offload of each block, in forward order."""
        left = [_placed(own) for own in mix.blocks]
        recomputed, moved = zip(*[left[kind].pop(0) for kind in self.kinds], strict=True)
        return recomputed, moved

    @property
    def choices(self) -> list[int]:
        """Return the indices in `CHOICES` that a block may have."""
        allowed = [(self.offloads or not moved) and (self.selects or how != "op") for how, moved in CHOICES]
        return [place for place, each in enumerate(allowed) if each]

    def corners(self) -> list[Mix]:
        """Return the corner mixes: all blocks recomputed; one kind with each other choice; all units kept."""
        least = tuple(_alike(0, size) for size in self.sizes)
        found = [Mix(least)]
        for kind, size in enumerate(self.sizes):
            others = (_alike(choice, size) for choice in self.choices[1:])
            found += [Mix((*least[:kind], other, *least[kind + 1 :])) for other in others]
        return [*found, Mix(least, self.units)] if self.units else found


def _alike(choice: int, size: int) -> tuple[int, ...]:
    return tuple(size * (place == choice) for place in range(len(CHOICES)))


def _placed(own: Sequence[int]) -> list[tuple[str, bool]]:
    """Return the choices of the blocks of a kind, in forward order."""
    size, thin, moved = sum(own), own[_THIN], own[_OFFLOADS_ALL]
    apart = {thin + place * (size - thin) // moved for place in range(moved)}
    others = iter([CHOICES[choice] for choice in _IN_ORDER for _ in range(own[choice])])
    return [CHOICES[_OFFLOADS_ALL] if place in apart else next(others) for place in range(size)]


@dataclass(frozen=True)
class Costs:
    """A model of [time, GiB]: `least` of the first corner, plus costs of a block of each kind (`blocks`:
    [kinds, choices, 2]) and of a kept unit. Times are per unit of work of the goal. `hidden`: the share of a
    kind's blocks whose full offload overlaps with computation; `late`: time that each further one adds."""

    least: np.ndarray[Any, Any]
    blocks: np.ndarray[Any, Any]
    unit: np.ndarray[Any, Any]
    hidden: np.ndarray[Any, Any]
    late: np.ndarray[Any, Any]

    @classmethod
    def fitted(cls, family: Family, figures: np.ndarray[Any, Any]) -> "Costs":
        """Fit the model to [time, GiB] of each of the family's corners."""
        more, sizes = figures - figures[0], np.array(family.sizes)
        blocks, others = np.zeros((len(sizes), len(CHOICES), 2)), family.choices[1:]
        for kind, size in enumerate(sizes):
            first = 1 + kind * len(others)
            blocks[kind, others] = more[first : first + len(others)] / size
        unit = more[-1] / family.units if family.units else np.zeros(2)
        late, hidden = np.zeros(len(sizes)), np.ones(len(sizes))
        if family.offloads:
            kept, moved = blocks[:, _KEEPS_ALL, 0] * sizes, blocks[:, _OFFLOADS_ALL, 0] * sizes
            waited = np.maximum(0.0, moved - kept)
            # Copies to the host overlap with forward, a third of the time; copies back with backward.
            forward = (figures[0, 0] + kept) / 3 * sizes / sizes.sum()
            copied = np.where(waited < forward, forward + waited, (3 * forward + waited) / 2)
            hidden = forward / copied
            late = waited / np.maximum(1, sizes * (1 - hidden))
            blocks[:, _OFFLOADS_ALL, 0] = blocks[:, _KEEPS_ALL, 0]
        return cls(figures[0], blocks, unit, hidden, late)

    def of(self, mix: Mix) -> np.ndarray[Any, Any]:
        """Return the modelled [time, GiB] of `mix`."""
        blocks = np.array(mix.blocks)
        beside = self.hidden * (blocks.sum(axis=1) - blocks[:, _THIN])
        over = np.maximum(0, blocks[:, _OFFLOADS_ALL] - beside) @ self.late
        figures = self.least + np.einsum("kc,kcf->f", blocks, self.blocks) + mix.kept * self.unit
        return figures + np.array([over, 0.0])

    def corrected(self, mix: Mix, found: Candidate) -> "Costs":
        """Return the model with a smaller `hidden` share if `mix` ran slower than predicted, by at least the
        cost of one late block."""
        moved = (np.array(mix.blocks)[:, _OFFLOADS_ALL] > 0) & (self.late > 0)
        if not found.speed or not moved.any() or 1 / found.speed - self.of(mix)[0] < self.late[moved].min():
            return self
        return dataclasses.replace(self, hidden=self.hidden * np.where(moved, _LESS, 1.0))

    def best(self, family: Family, gib: float) -> Mix | None:
        """Return the fastest mix within `gib` by integer programming; None if there is none."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes long to import

        # Variables: blocks of each kind with each choice, kept units, late blocks of each kind.
        kinds, count = len(family.sizes), len(CHOICES)
        late = np.stack([self.late, np.zeros(kinds)], axis=1)
        prices = np.vstack([self.blocks.reshape(-1, 2), self.unit, late])
        none, each = np.zeros((kinds, 1)), np.eye(kinds)
        belongs = np.hstack([np.kron(each, np.ones(count)), none, 0 * each])
        # Late blocks >= blocks that offload everything - `hidden` share of the blocks that are not thin.
        _, thin, _, _, moves = np.eye(count)
        moved = np.hstack([np.kron(each, moves) + np.kron(np.diag(self.hidden), thin), none, -each])
        allowed = np.isin(np.arange(count), family.choices)
        solved = milp(
            prices[:, 0] / self.least[0],
            integrality=[*np.ones(len(prices) - kinds), *np.zeros(kinds)],
            bounds=Bounds(0, [*np.kron(family.sizes, allowed), family.units, *family.sizes]),
            constraints=[
                LinearConstraint(belongs, family.sizes, family.sizes),
                LinearConstraint(moved, -np.inf, self.hidden * family.sizes),
                LinearConstraint(prices[:, 1], -np.inf, gib - self.least[1]),
            ],
        )
        if solved.x is None:
            return None
        *blocks, kept = (round(x) for x in solved.x[:-kinds])
        of_kinds = zip(*[iter(blocks)] * count, strict=True)
        return Mix(tuple(of_kinds), kept)


def _figures_at(family: Family, near: Sequence[Candidate], far: Candidate) -> np.ndarray[Any, Any]:
    """Extrapolate [time, GiB] of corners from those at one batch, `near`, and the first one at another. A
    choice costs constant time per sample, and bytes by the batch; a kept unit constant time per step."""
    figures = np.array([(1 / each.speed, _gib(each)) for each in near])
    at, first, last = (config.settings.batch for config in (family.base, near[0].config, far.config))
    scaled = (figures - figures[0]) * (1.0, at / first)
    if family.units:
        scaled[-1] = (figures[-1] - figures[0]) * (first / at, 1.0)
    if last == first:
        return figures
    share = (1 / at - 1 / first) / (1 / last - 1 / first), (at - first) / (last - first)
    least = figures[0] + share * ((1 / far.speed, _gib(far)) - figures[0])
    return np.asarray(least + scaled)


def _figures(candidate: Candidate) -> np.ndarray[Any, Any]:
    return np.array([1 / candidate.speed, _gib(candidate)])


def _gib(candidate: Candidate) -> float:
    return (candidate.memory or 0) / 2**30


@dataclass(frozen=True)
class Chosen:
    """The fastest uniform candidate that fits at the upper end of its memory interval (None if none does) and
    the fastest per-unit one; how many candidates were simulated, and the bytes that a GPU may reserve."""

    uniform: Candidate | None
    by_unit: Candidate
    simulated: int
    usable: int


class NothingFitsError(BenchError):
    """Raised if a per-unit search finds nothing that surely fits."""


def choose(tried: Sequence[Candidate], judge: Judge, memory: int | None) -> Chosen:
    """Choose settings per unit, and a batch of the uniform candidates `tried`, within the GPU's memory or
    `memory`. Return the best uniform candidate if nothing is faster.

    Raises `NothingFitsError`, or `UsageError` for a model without blocks.
    """
    uniform = max(filter(is_safe, tried), key=lambda each: each.speed, default=None)
    search = Search(judge, memory, tried, uniform)
    for families, start in _families(tried):
        search.search(families, start)
    search.improve()
    search.vary_units()
    if search.best is None:
        raise NothingFitsError("--per-unit: no choice by unit fits safely: smaller batches or more GPUs may")
    return Chosen(uniform, search.best, search.simulated, _usable(search.best.config, memory))


def _usable(config: Config, memory: int | None) -> int:
    return min(each for each in (usable_bytes(config), memory) if each is not None)


def is_safe(candidate: Candidate) -> bool:
    """Return whether it ran, and fits at the upper end of its memory interval."""
    return candidate.feasible and not candidate.risky


def _families(tried: Sequence[Candidate]) -> list[tuple[list[Family], int]]:
    """Return families near the fastest uniform candidate: one for each batch, and the index to start at."""
    found: dict[str, dict[int, tuple[Config, float]]] = {}
    for each in tried:
        base = _base_of(each.config)
        key = content_key(dataclasses.replace(base, settings=base.settings.changed(batch=1)))
        batches, batch = found.setdefault(key, {}), base.settings.batch
        belongs = is_safe(each) and (not each.config.settings.activation_offload or _can_offload(base))
        speed = each.speed if belongs else 0.0
        batches[batch] = (base, max(speed, batches.get(batch, (base, 0.0))[1]))
    speeds = {key: max(speed for _, speed in batches.values()) for key, batches in found.items()}
    near = [key for key, speed in speeds.items() if speed >= _NEAR * max(speeds.values())]
    families = []
    for batches in (found[key] for key in sorted(near, key=lambda key: -speeds[key])[:_FAMILIES]):
        ordered = sorted(batches)
        start = max(range(len(ordered)), key=lambda place: batches[ordered[place]][1])
        families.append(([family_of(batches[batch][0]) for batch in ordered], start))
    return families


def _base_of(config: Config) -> Config:
    settings = config.settings.changed(
        activation_checkpointing="full",
        checkpoint_first=None,
        reshard_after_forward=None,
        activation_offload=False,
        keep_last_unsharded=False,
        strategy=_GATHERED.get(config.settings.strategy, config.settings.strategy),
    )
    return without_absent(dataclasses.replace(config, settings=settings))


def family_of(base: Config) -> Family:
    """Return the family of a configuration. Raises `UsageError` for a model without blocks."""
    workload, wrap = workload_named(base), base.settings.wrap
    import torch

    with torch.device("meta"):
        model = workload.build()
    seen: dict[tuple[str, int], int] = {}
    kinds = alike(
        seen.setdefault((type(module).__name__, sum(p.numel() for p in module.parameters())), len(seen))
        for module in model.modules()
        if isinstance(module, workload.block_classes)
    )
    if not kinds:
        raise UsageError(f"--per-unit: {workload.name} has no blocks to choose for: leave it out")
    free = base.settings.strategy in _GATHERED.values()
    free &= "reshard_after_forward" not in not_applicable(base, ("reshard_after_forward",))
    units = workload.units(wrap) or 0
    return Family(base, kinds, units if free else 0, _can_offload(base))


def _can_offload(base: Config) -> bool:
    """Return whether blocks may offload: the system supports it, and each block is a unit."""
    workload, moved = workload_named(base), base.settings.changed(activation_offload=True)
    refused = not_applicable(dataclasses.replace(base, settings=moved), ("activation_offload",), base)
    return not refused and workload.units(base.settings.wrap) == workload.units("block")


def alike(kinds: Iterable[int]) -> tuple[int, ...]:
    """Return the kind of each block; a single kind for all if there are too many to search."""
    found = tuple(kinds)
    return found if max(found, default=0) < _MOST_KINDS else (0,) * len(found)


class Search:
    """A search over families. `best`: the fastest candidate that surely fits; `simulated`: how many ran."""

    def __init__(
        self, judge: Judge, memory: int | None, tried: Sequence[Candidate], best: Candidate | None
    ) -> None:
        self._judge, self._memory = judge, memory
        self._known = {content_key(each.config): each for each in tried}
        self._starts: list[tuple[Candidate, Family, Costs, float, Mix]] = []
        self.best, self.simulated = best, 0

    def search(self, families: Sequence[Family], start: int) -> None:
        """Search families of one batch each, most promising first, by the costs of the family at `start` and
        the first corner of the farthest one. Also search without offload: its memory is predicted better."""
        promising: list[tuple[float, Family, Costs, float]] = []
        for offloads in sorted({False, families[start].offloads}):
            own = [dataclasses.replace(family, offloads=offloads) for family in families]
            near = self._corners(own[start])
            far = self._corners(own[0 if start else -1], 1) if near else []
            for family in own if far else ():
                costs = Costs.fitted(family, _figures_at(family, near, far[0]))
                gib = self._limit(family.base, near[offloads])
                if (mix := costs.best(family, gib)) is not None:
                    promising.append((costs.of(mix)[0], family, costs, gib))
        for time, family, costs, gib in sorted(promising, key=lambda each: each[0])[:_SEARCHED]:
            if not self._is_slower(time):
                self._search(family, costs, gib)

    def improve(self) -> None:
        """Improve each starting mix, the fastest first, by moving to neighbours that beat the best."""
        for _, family, costs, gib, mix in sorted(self._starts, key=lambda each: -each[0].speed):
            self._improve(family, costs, gib, mix)

    def vary_units(self) -> None:
        """Vary sizes of the best candidate's units, then their prefetch; of half of them if not all fit."""
        if self.best is None or self.best.config.script is not None:
            return
        for name, variants in _OF_UNITS.items():
            left, least = _IN_VAIN, 1.0 if name == "wrap" else 1 + _MARGIN
            for group in variants(self.best.config):
                before, left = self.best, left - 1
                for config in group:
                    if not_applicable(config, (name,)):
                        break
                    found = self._tried(config, least)
                    if found.speed == before.speed and name != "wrap":
                        left = 0  # no gather was late
                    if is_safe(found):
                        break
                if not (left := _IN_VAIN if self.best is not before else left):
                    break

    def _simulated(self, configs: Iterable[Config]) -> list[Candidate]:
        keys = {content_key(config): config for config in configs}
        new = [config for key, config in keys.items() if key not in self._known]
        if new:
            self._known |= dict(zip(map(content_key, new), self._judge(new), strict=True))
        self.simulated += len(new)
        return [self._known[key] for key in keys]

    def _corners(self, family: Family, most: int | None = None) -> list[Candidate]:
        """Simulate the family's (first `most`) corners; return none if one of them cannot run."""
        configs = [family.config(mix) for mix in family.corners()[:most]]
        refused = configs[-1].script is None and not_applicable(configs[-1])
        found = [] if refused else self._simulated(map(self._with_room, configs))
        return found if all(each.status is Status.OK and each.memory for each in found) else []

    def _search(self, family: Family, costs: Costs, gib: float) -> None:
        """Search one family, starting from the model's best mix and from corners known to be safe."""
        known = {mix: self._known.get(content_key(family.config(mix))) for mix in family.corners()}
        found = {mix: each for mix, each in known.items() if each and is_safe(each)}
        wrong = late = 0.0
        for _ in range(_ROUNDS):
            mix = costs.best(family, gib - wrong)
            if mix is None or mix in found or self._is_slower(costs.of(mix)[0] + late):
                break
            found[mix] = self._exact(family, mix)
            wrong = _gib(found[mix]) - costs.of(mix)[1]
            costs = costs.corrected(mix, found[mix])
            late = max(0.0, 1 / (found[mix].speed or np.inf) - costs.of(mix)[0])
        safe = [mix for mix, each in found.items() if is_safe(each)]
        if safe:
            start = max(safe, key=lambda mix: found[mix].speed)
            self._starts.append((found[start], family, costs, gib, start))

    def _with_room(self, config: Config) -> Config:
        """Return `config`, or its variant on GPUs with more memory unless it is known to run safely."""
        known = self._known.get(content_key(config))
        return config if known and is_safe(known) and known.memory else with_room(config)

    def _is_slower(self, time: float, margin: float = _MARGIN) -> bool:
        return self.best is not None and time * self.best.speed >= 1 + margin

    def _limit(self, base: Config, like: Candidate) -> float:
        """Return the GiB whose upper interval end equals the memory that may be reserved."""
        size = like.memory or 1
        low = like.interval.peak_memory_bytes["reserved"][0] if like.interval else size
        return _usable(base, self._memory) * low / size / 2**30

    def _exact(self, family: Family, mix: Mix) -> Candidate:
        """Simulate `mix`; if it runs out of memory, take its memory from a run on larger GPUs."""
        config = family.config(mix)
        found = self._tried(config)
        if found.memory is None or found.status is not Status.OK:
            (roomy,) = self._simulated([with_room(config)])
            return dataclasses.replace(found, memory=roomy.memory)
        return found

    def _tried(self, config: Config, least: float = 1.0) -> Candidate:
        """Simulate a configuration; update `best` if it is faster by more than the factor `least`."""
        (found,) = self._simulated([config])
        if is_safe(found) and (self.best is None or found.speed > least * self.best.speed):
            self.best = found
        return found

    def _improve(self, family: Family, costs: Costs, gib: float, mix: Mix) -> None:
        """Move to the fastest neighbour while one is predicted to beat the best and to fit. Predictions are
        the model plus its error at the nearest mix that ran here."""
        now, left = self._exact(family, mix), _TRIES
        errors, tried = {mix: _figures(now) - costs.of(mix)}, {mix}
        while left:
            likely = {}
            for other, moves in _neighbours(family, mix).items():
                nearest = min(errors, key=lambda each: (other.apart(each), each != mix))
                time, size = costs.of(other) + errors[nearest]
                margin = _MARGIN if moves == 1 else 0.0
                if not self._is_slower(time, margin) and size < (1 + margin) * gib and other not in tried:
                    likely[other] = time
            if not likely:
                return
            other = min(likely, key=lambda each: likely[each])
            found, left = self._exact(family, other), left - 1
            tried.add(other)
            if found.speed:
                errors[other] = _figures(found) - costs.of(other)
            if is_safe(found) and found.speed > now.speed:
                now, mix, left = found, other, _TRIES


def _neighbours(family: Family, mix: Mix) -> dict[Mix, int]:
    """Return the neighbours of a mix, each with its number of moves: 1, or 2 of single blocks or units."""
    found = {other: 1 for step in _STEPS for other in _moved(family, mix, step)}
    for other in _moved(family, mix, 1):
        for further in _moved(family, other, 1):
            found.setdefault(further, 2)
    return {other: moves for other, moves in found.items() if other != mix}


def _moved(family: Family, mix: Mix, step: int) -> Iterator[Mix]:
    """Yield the mixes with `step` blocks of one kind changed, or `step` more or fewer units kept."""
    for kind, own in enumerate(mix.blocks):
        for one, other in itertools.permutations(family.choices, 2):
            if own[one] >= step:
                changed = [n - step * (i == one) + step * (i == other) for i, n in enumerate(own)]
                yield Mix((*mix.blocks[:kind], tuple(changed), *mix.blocks[kind + 1 :]), mix.kept)
    for kept in (mix.kept - step, mix.kept + step):
        if 0 <= kept <= family.units:
            yield Mix(mix.blocks, kept)


def of_sizes(config: Config) -> Iterator[list[Config]]:
    """Yield `config` with units of two blocks if both have the same settings: everywhere, after the first,
    before the last, in the first half, in the second half."""
    stacks, settings = workload_named(config).stacks(), config.settings
    now, count, half = unit_sizes(settings.wrap, stacks), sum(stacks), sum(stacks) // 2
    if not now:
        return
    names = ("activation_offload", "reshard_after_forward")
    mixed = {name: value for name in names if is_mixed(value := getattr(settings, name))}
    each = {
        name: [word == "true" for word, size in zip(spread(value), now, strict=True) for _ in range(size)]
        for name, value in mixed.items()
    }
    ends = {sum(stacks[: place + 1]) - 1 for place in range(len(stacks))}
    alike = {
        place
        for place in range(count)
        if place not in ends and all(words[place] == words[place + 1] for words in each.values())
    }
    for places in (range(count), range(1, count), range(count - 2), range(half), range(half, count)):
        sizes = _paired(count, alike & {*places})
        if sizes != now:
            starts = [sum(sizes[:unit]) for unit in range(len(sizes))]
            values = {name: written([words[start] for start in starts]) for name, words in each.items()}
            values["wrap"] = written([f"every-{size}" for size in sizes])
            uniform = not mixed and not is_mixed(settings.activation_checkpointing)
            if uniform and not is_mixed(values["wrap"]):
                continue
            yield [dataclasses.replace(config, settings=settings.changed(**values))]


def written(each: Sequence[Value]) -> Value:
    """Return the values of all units as a setting; a single value if they are equal."""
    return each[0] if len(set(each)) == 1 else joined(each)


def _paired(count: int, pairs: Container[int]) -> list[int]:
    sizes: list[int] = []
    while (place := sum(sizes)) < count:
        sizes.append(2 if place in pairs else 1)
    return sizes


def ahead(name: str, config: Config) -> Iterator[list[Config]]:
    """Yield `config` with explicit prefetch of one or two units in all units, or in half of them."""
    units, forward = workload_named(config).units(config.settings.wrap) or 0, name == "forward_prefetch"
    least = 0 if forward else 1
    # The last unit has none ahead and keeps the minimum, so there are always two values.
    has_more = range(units - 1) if forward else range(1, units)
    for distance in range(least + 1, 3):
        places = has_more, has_more[: units // 2], has_more[units // 2 :]
        values = [joined([distance if unit in some else least for unit in range(units)]) for some in places]
        changed = (config.settings.changed(**{name: value}) for value in values if "+" in value)
        yield [dataclasses.replace(config, settings=settings) for settings in changed]


_OF_UNITS: Mapping[str, Callable[[Config], Iterator[list[Config]]]] = {
    "wrap": of_sizes,
    **{name: partial(ahead, name) for name in ("forward_prefetch", "backward_prefetch_depth")},
}
