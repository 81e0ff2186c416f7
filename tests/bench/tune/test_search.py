"""The search finds the best of a space without trying all of it, and always the same way."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fsdpbench.answers.tune.front import Candidate, pareto
from fsdpbench.answers.tune.run import BATCH, search
from fsdpbench.base.configuration.config import Config
from fsdpbench.cli.requests.request import make_request
from fsdpbench.engine.results.records import Status


def points() -> list[Config]:
    given = {"model": "gpt-tiny", "gpus": 8, "device": "sim", "preset": "wide"}
    given["system"] = "impl-fsdp1,impl-fsdp2"
    return make_request(given, {}, whole_space=False).plan().points


def made_up(config: Config) -> Candidate:
    """A speed with one best point: every setting of it counts, and a large batch without checkpointing does
    not fit."""
    settings = config.settings
    speed = 100.0 + 10 * settings.batch
    speed += {"pre": 30, "post": 15, "none": 0}[settings.backward_prefetch or "none"]
    speed += {"block": 20, "every-2": 10, "every-4": 0}[settings.wrap]
    speed -= 40 if settings.activation_checkpointing == "full" else 0
    memory = settings.batch * (2 if settings.activation_checkpointing == "full" else 10)
    return Candidate(config, Status.OK, speed, memory, memory <= 100)


def tried(trials: int, seed: int, space: Sequence[Config]) -> list[Candidate]:
    return search(space, trials, seed, lambda batch: [made_up(config) for config in batch])


def test_it_finds_the_best_of_thousands_in_a_fraction_of_them() -> None:
    space = points()
    assert len(space) > 2000
    found = tried(160, 0, space)
    assert len(found) == 160
    assert len({id(candidate.config) for candidate in found}) == 160
    best = max(candidate.speed for candidate in map(made_up, space) if candidate.feasible)
    assert pareto(found)[0].speed >= 0.97 * best
    # Most of what it tries is near the best, of points drawn evenly few are.
    blind = [made_up(config) for config in random.Random(0).sample(list(space), 160)]

    def good(candidates: Sequence[Candidate]) -> int:
        return sum(c.feasible and c.speed >= 0.9 * best for c in candidates)

    assert good(found) > 2 * good(blind)


@pytest.mark.campaign
def test_one_seed_always_tries_the_same_points() -> None:
    space = points()
    first, second, other = (tried(4 * BATCH, seed, space) for seed in (3, 3, 4))
    assert [c.config for c in first] == [c.config for c in second]
    assert [c.config for c in first] != [c.config for c in other]


def test_a_small_space_is_tried_whole_and_needs_no_sampler() -> None:
    space = points()[:11]
    assert [candidate.config for candidate in tried(50, 0, space)] == space
