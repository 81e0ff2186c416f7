"""The choice by unit: the fastest mix of blocks that fits, as brute force over all mixes finds it, and never
slower than what is uniform."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from fsdpbench.answers.tune.front import Candidate, Goal
from fsdpbench.answers.tune.front import judge as judged
from fsdpbench.answers.tune.per_unit import CHOICES, Costs, Mix, choose, family_of, is_safe
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError
from fsdpbench.base.settings.values import is_mixed, joined, spread, unit_sizes
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.result import Interval
from fsdpbench.sweep.planning import configured, make_target
from fsdpbench.sweep.runner import UNTRACED
from fsdpbench.sweep.trials import simulate

GIB = 2**30
TIMES = {"full": 1.33, "op": 1.2, "none": 1.0}
SIZES = {"full": 0.1, "op": 1.0, "none": 1.7}
OFFLOADED = 0.05
COPY = 0.7
"""The time of a block's copy to the host, or back: beside forward, a third of the time, or backward."""


def config(model: str = "gpt-tiny", system: str = "torch-fsdp2", **settings: object) -> Config:
    target = make_target(model=model, gpus=8, hardware="a100-80gb", shape={"layers": 6})
    return configured(target, system, **settings)


def measured(asked: Config) -> tuple[float, float]:
    """The time of a sample and the GiB of a machine that is no sum of its blocks: memory has two peaks."""
    settings, layers = asked.settings, int(asked.shape["layers"])
    how, reshard = settings.activation_checkpointing, settings.reshard_after_forward
    recomputed = spread(how) if is_mixed(how) else [how] * layers
    sizes = unit_sizes(settings.wrap, [layers])
    if isinstance(reshard, str):
        kept = sum(size for size, word in zip(sizes, spread(reshard), strict=True) if word == "false")
    else:
        kept = layers if reshard is False or settings.strategy == "SHARD_GRAD_OP" else 0
    offload = settings.activation_offload
    words = spread(offload) if is_mixed(offload) else [str(offload).lower()] * len(sizes)
    moved = [word == "true" for word, size in zip(words, sizes, strict=True) for _ in range(size)]
    copied = COPY * sum(one == "none" and away for one, away in zip(recomputed, moved, strict=True))
    time = sum(TIMES[one] for one in recomputed) - 0.04 * kept + 3 / settings.batch
    time -= 0.01 * sizes.count(2) + (0.02 if is_mixed(settings.forward_prefetch) else 0)
    time += max(0, copied - time / 3) + max(0, copied - time * 2 / 3)
    saved = (OFFLOADED if away else SIZES[one] for one, away in zip(recomputed, moved, strict=True))
    held = settings.batch * sum(saved) + 1.2 * kept
    return time, 3.0 + max(held, 2.5 + 0.6 * held)


def judge(configs: Sequence[Config], gib: float) -> list[Candidate]:
    """Candidates whose memory may be a tenth more; of it there are `gib`."""
    found = []
    for asked in configs:
        time, size = measured(asked)
        fits = size <= gib or asked.what_if is not None
        reserved = round(size * GIB / 1.1), round(size * GIB * 1.1)
        interval = Interval(0.9, (time, time), peak_memory_bytes={"reserved": reserved})
        status, memory = (Status.OK, round(size * GIB)) if fits else (Status.OOM, None)
        found.append(Candidate(asked, status, fits / time, memory, fits, interval, size * 1.1 > gib))
    return found


def fastest(gib: float, batches: Sequence[int]) -> Candidate:
    """The best of all mixes that surely fit."""
    own = [each for each in itertools.product(range(7), repeat=len(CHOICES)) if sum(each) == 6]
    counts = [Mix((each,), kept) for each in own for kept in range(7)]
    families = [family_of(config(batch=batch)) for batch in batches]
    found = judge([family.config(mix) for family in families for mix in counts], gib)
    return max((each for each in found if is_safe(each)), key=lambda each: each.speed)


def grid(**fixed: object) -> list[Config]:
    found = itertools.product(("full", "op", "none"), ("FULL_SHARD", "SHARD_GRAD_OP"))
    return [config(activation_checkpointing=how, strategy=kept, **fixed) for how, kept in found]


@pytest.mark.parametrize(("gib", "batches"), [(8, (1,)), (11, (1, 2, 3)), (20, (1,))])
def test_no_mix_is_clearly_faster(gib: float, batches: tuple[int, ...]) -> None:
    def run(configs: Sequence[Config]) -> list[Candidate]:
        return judge(configs, gib)

    tried = [each for batch in batches for each in run(grid(batch=batch))]
    chosen, memory = choose(tried, run, round(gib * GIB)), round(gib * GIB)
    assert chosen.by_unit.speed >= 0.98 * fastest(gib, batches).speed
    assert 1.1 * (chosen.by_unit.memory or math.inf) <= memory == chosen.usable
    assert chosen.uniform is None or chosen.uniform.speed <= chosen.by_unit.speed
    assert chosen.simulated < 70, "a small part of all mixes"
    assert choose(tried, run, memory) == chosen


@pytest.mark.parametrize("gib", [6.5, 9, 13, 21, 34, 60])
def test_it_is_never_slower_than_the_best_of_all_batches(gib: float) -> None:
    def run(configs: Sequence[Config]) -> list[Candidate]:
        return judge(configs, gib)

    tried = [each for batch in (1, 2, 3, 4, 6) for each in run(grid(batch=batch))]
    uniform = max((each.speed for each in tried if is_safe(each)), default=0.0)
    chosen = choose(tried, run, None)
    assert chosen.by_unit.speed >= uniform == (chosen.uniform.speed if chosen.uniform else 0.0)
    assert is_safe(chosen.by_unit)


def test_what_nothing_improves_stays_uniform() -> None:
    """All fits, but for what a machine that is slower by unit does not have."""

    def run(configs: Sequence[Config]) -> list[Candidate]:
        names = ("activation_checkpointing", "wrap", "forward_prefetch", "backward_prefetch_depth")
        uniform = [not any(is_mixed(getattr(each.settings, name)) for name in names) for each in configs]
        found = judge(configs, 60)
        return [
            each if alike else dataclasses.replace(each, speed=each.speed / 2)
            for each, alike in zip(found, uniform, strict=True)
        ]

    tried = [each for batch in (1, 4) for each in run(grid(batch=batch))]
    chosen = choose(tried, run, 60 * GIB)
    assert chosen.by_unit == chosen.uniform == max(tried, key=lambda each: each.speed)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_no_assignment_of_four_blocks_is_faster_in_the_simulator() -> None:
    """Every assignment of recomputation to blocks, whatever the order, with no unit kept, and with two."""

    def run(configs: Sequence[Config]) -> list[Candidate]:
        return [judged(each.config, each.result, goal) for each in simulate(list(configs), 1)]

    shape = {"layers": 4, "vocab": 1024}
    target = make_target(model="gpt-125m", gpus=8, hardware="a100-80gb", shape=shape, measurement=UNTRACED)
    goal, how = Goal("tokens_per_s"), {"batch": 64, "seq": 512}
    alike = [
        configured(target, "torch-fsdp2", activation_checkpointing=each, strategy=strategy, **how)
        for each in ("full", "op", "none")
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    ]
    ends = [each.interval.peak_memory_bytes["reserved"][1] for each in run(alike) if each.interval]
    goal = Goal("tokens_per_s", memory=(min(ends) + max(ends)) // 2)
    chosen = choose(run(alike), run, goal.memory)
    every = [
        configured(
            target, "torch-fsdp2", activation_checkpointing=joined(each), reshard_after_forward=kept, **how
        )
        for each in itertools.product(("full", "op", "none"), repeat=4)
        if len(set(each)) > 1
        for kept in (True, "true:2+false:2")
    ]
    safe = [each.speed for each in run(every) if is_safe(each)]
    assert 0 < len(safe) < len(every), "memory is short for some and not for all"
    assert is_safe(chosen.by_unit)
    assert chosen.uniform is None or chosen.by_unit.speed >= chosen.uniform.speed
    assert chosen.by_unit.speed >= 0.999 * max(safe), "equal, but for the order of equal blocks"


@pytest.mark.parametrize(
    ("blocks_late", "is_corrected"), [(0.0, False), (0.9, False), (1.1, True), (3, True)]
)
def test_only_what_a_late_block_costs_is_blamed_on_the_link(blocks_late: float, is_corrected: bool) -> None:
    family = family_of(config(batch=1))
    times = np.array(
        [1 / each.speed for each in judge([family.config(mix) for mix in family.corners()], 1e9)]
    )
    costs = Costs.fitted(family, np.stack([times, np.ones(len(times))], axis=1))
    assert costs.late[0] > 0, "a machine that waits when all blocks offload"
    mix = Mix(((3, 0, 0, 0, 3),))
    (found,) = judge([family.config(mix)], 1e9)
    slower = dataclasses.replace(found, speed=1 / (costs.of(mix)[0] + blocks_late * costs.late[0]))
    assert (costs.corrected(mix, slower) is not costs) == is_corrected
    assert costs.corrected(Mix(((6, 0, 0, 0, 0),)), dataclasses.replace(found, speed=1e-9)) is costs


def test_units_that_cannot_offload_are_not_searched_because_others_do() -> None:
    gib, asked = 8.5, []
    settings = {"batch": 8, "activation_checkpointing": "full"}
    uniform = [
        config(wrap=wrap, activation_offload=moved, **settings)
        for wrap, moved in itertools.product(("block", "every-2"), (False, True))
    ]

    def run(configs: Sequence[Config]) -> list[Candidate]:
        asked.extend(configs)
        return judge(configs, gib)

    tried = judge(uniform, gib)
    assert [is_safe(each) for each in tried] == [False, True, False, True]
    chosen = choose(tried, run, round(gib * GIB))
    assert chosen.uniform is not None
    assert chosen.uniform.config.settings.wrap == "every-2", "the fastest, and by a family of no use"
    assert asked
    assert all(each.settings.wrap != "every-2" for each in asked)


def test_nothing_that_fits_is_said() -> None:
    with pytest.raises(BenchError, match="smaller batches or more GPUs"):
        choose(judge(grid(batch=1), 1), lambda configs: judge(configs, 1), GIB)


def test_what_recomputes_comes_first_and_what_stays_gathered_last() -> None:
    mixed = family_of(config(batch=1)).config(Mix(((1, 0, 2, 3, 0),), 2)).settings
    assert mixed.activation_checkpointing == "full:1+op:2+none:3"
    assert mixed.reshard_after_forward == "true:4+false:2"
    alike = family_of(config(batch=1)).config(Mix(((0, 0, 6, 0, 0),), 6)).settings
    assert (alike.activation_checkpointing, alike.reshard_after_forward) == ("op", False)


def test_blocks_that_offload_all_they_save_are_spread() -> None:
    mixed = family_of(config(batch=1)).config(Mix(((2, 1, 0, 1, 2),))).settings
    assert mixed.activation_checkpointing == "full:1+none:1+full:1+none:1+full:1+none:1"
    assert mixed.activation_offload == "true:2+false:1+true:1+false:2"


def test_kinds_of_blocks_and_systems_without_resharding_by_unit() -> None:
    t5 = family_of(config("t5-tiny", batch=1))
    assert t5.sizes == [6, 6]
    mix = Mix(((6, 0, 0, 0, 0), (1, 0, 0, 5, 0)), 0)
    assert t5.config(mix).settings.activation_checkpointing == "full:7+none:5"
    flat, coarse = family_of(config(system="torch-fsdp1")), family_of(config(wrap="every-4"))
    assert (flat.units, flat.offloads, coarse.units, coarse.offloads) == (0, True, 2, False)
