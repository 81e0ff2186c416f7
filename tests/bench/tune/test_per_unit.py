"""The choice by unit: the fastest mix of blocks that fits, as brute force over all mixes finds it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.answers.tune.per_unit import Mix, choose, family_of, is_safe
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError
from fsdpbench.base.settings.values import is_mixed, spread
from fsdpbench.engine.results.records import Status
from fsdpbench.sweep.planning import configured, make_target

GIB = 2**30
TIMES = {"full": 1.33, "op": 1.2, "none": 1.0}
SIZES = {"full": 0.1, "op": 1.0, "none": 1.7}


def config(model: str = "gpt-tiny", system: str = "torch-fsdp2", **settings: object) -> Config:
    target = make_target(model=model, gpus=8, hardware="a100-80gb", shape={"layers": 6})
    return configured(target, system, **settings)


def measured(asked: Config) -> tuple[float, float]:
    """The time of a sample and the GiB of a machine that is no sum of its blocks: memory has two peaks."""
    settings, layers = asked.settings, int(asked.shape["layers"])
    how, reshard = settings.activation_checkpointing, settings.reshard_after_forward
    each = spread(how) if is_mixed(how) else [how] * layers
    if isinstance(reshard, str):
        kept = spread(reshard).count("false")
    else:
        kept = layers if reshard is False or settings.strategy == "SHARD_GRAD_OP" else 0
    time = sum(TIMES[one] for one in each) - 0.04 * kept + 3 / settings.batch
    held = settings.batch * sum(SIZES[one] for one in each) + 1.2 * kept
    return time, 3.0 + max(held, 2.5 + 0.6 * held)


def judge(configs: Sequence[Config], gib: float) -> list[Candidate]:
    """Candidates whose memory may be a tenth more; of it there are `gib`."""
    found = []
    for asked in configs:
        time, size = measured(asked)
        fits = size <= gib or asked.what_if is not None
        interval = {"peak_memory_bytes": {"reserved": [round(size * GIB / 1.1), round(size * GIB * 1.1)]}}
        status, memory = (Status.OK, round(size * GIB)) if fits else (Status.OOM, None)
        found.append(Candidate(asked, status, fits / time, memory, fits, interval, size * 1.1 > gib))
    return found


def fastest(gib: float, batches: Sequence[int]) -> Candidate:
    """The best of all mixes that surely fit."""
    counts = [
        Mix(((full, op, 6 - full - op),), kept)
        for full, op, kept in itertools.product(range(7), range(7), range(7))
        if full + op <= 6
    ]
    families = [family_of(config(batch=batch)) for batch in batches]
    found = judge([family.config(mix) for family in families for mix in counts], gib)
    return max((each for each in found if is_safe(each)), key=lambda each: each.speed)


def grid(**fixed: object) -> list[Config]:
    found = itertools.product(("full", "op", "none"), ("FULL_SHARD", "SHARD_GRAD_OP"))
    return [config(activation_checkpointing=how, strategy=kept, **fixed) for how, kept in found]


@pytest.mark.parametrize(("gib", "batches"), [(8, (1,)), (11, (1, 2, 4)), (20, (1,))])
def test_no_mix_is_clearly_faster(gib: float, batches: tuple[int, ...]) -> None:
    def run(configs: Sequence[Config]) -> list[Candidate]:
        return judge(configs, gib)

    tried = [each for batch in batches for each in run(grid(batch=batch))]
    chosen, memory = choose(tried, run, round(gib * GIB)), round(gib * GIB)
    assert chosen.by_unit.speed >= 0.98 * fastest(gib, batches).speed
    assert 1.1 * (chosen.by_unit.memory or math.inf) <= memory == chosen.usable
    assert chosen.uniform is None or chosen.uniform.speed <= chosen.by_unit.speed
    assert chosen.simulated < 60, "a small part of all mixes"
    assert choose(tried, run, memory) == chosen


def test_nothing_that_fits_is_said() -> None:
    with pytest.raises(BenchError, match="smaller batches or more GPUs"):
        choose(judge(grid(batch=1), 1), lambda configs: judge(configs, 1), GIB)


def test_what_recomputes_comes_first_and_what_stays_gathered_last() -> None:
    mixed = family_of(config(batch=1)).config(Mix(((1, 2, 3),), 2)).settings
    assert mixed.activation_checkpointing == "full:1+op:2+none:3"
    assert mixed.reshard_after_forward == "true:4+false:2"
    alike = family_of(config(batch=1)).config(Mix(((0, 6, 0),), 6)).settings
    assert (alike.activation_checkpointing, alike.reshard_after_forward) == ("op", False)


def test_kinds_of_blocks_and_systems_without_resharding_by_unit() -> None:
    t5 = family_of(config("t5-tiny", batch=1))
    assert t5.sizes == [6, 6]
    assert t5.config(Mix(((6, 0, 0), (1, 0, 5)), 0)).settings.activation_checkpointing == "full:7+none:5"
    assert family_of(config(system="torch-fsdp1")).units == 0
    assert family_of(config(wrap="every-4")).units == 2
