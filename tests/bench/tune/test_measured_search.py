"""Real runs led by the simulated ranking: its best first, then what has been measured decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.answers.tune.measured_search import RealBudget, search_measured
from fsdpbench.answers.tune.run import rank_agreement
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Value
from fsdpbench.cli.requests.request import make_request
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.result import Result
from fsdpbench.sweep.runner import first_run, merged

Speed = Callable[[Config], float]


@functools.cache
def points() -> list[Config]:
    given = {"model": "gpt-tiny", "gpus": 2, "device": "cpu", "system": "impl-fsdp1"}
    lists: dict[str, list[Value]] = {
        "batch": [1, 2, 4],
        "wrap": ["block", "every-2", "root"],
        "activation_checkpointing": ["none", "full"],
        "backward_prefetch": ["pre", "post", "none"],
        "limit_all_gathers": [2, 3, "off"],
    }
    return make_request(given, lists, whole_space=True).plan().points


def simulated_speed(config: Config) -> float:
    """What the simulation believes: the batch counts most; of checkpointing it has no opinion."""
    return 1e6 + 1e5 * config.settings.batch + 1e4 * (config.settings.wrap == "block")


def real_speed(config: Config, best: str = "full") -> float:
    """A device a thousand times slower, on which checkpointing (or its absence) counts most."""
    return simulated_speed(config) / 1000 + 600 * (config.settings.activation_checkpointing == best)


def candidate(config: Config, speed: float, feasible: bool = True) -> Candidate:
    return Candidate(config, Status.OK, speed, None, feasible)


def searched(
    space: list[Config], known: list[Candidate | None], budget: RealBudget, real: Speed = real_speed
) -> list[Candidate]:
    order = sorted(
        (i for i, each in enumerate(known) if each is not None and each.feasible),
        key=lambda i: -known[i].speed,  # type: ignore[union-attr]
    )
    found = search_measured(space, known, order, budget, 0, lambda config: candidate(config, real(config)))
    assert all(found[place].config is space[place] for place in found)
    return list(found.values())


def all_known(space: list[Config]) -> list[Candidate | None]:
    return [replace(candidate(config, simulated_speed(config)), memory=7) for config in space]


def test_the_best_simulated_points_run_first() -> None:
    space = points()
    assert len(space) == 162
    found = searched(space, all_known(space), RealBudget(seeds=5, runs=5))
    assert [each.config for each in found] == sorted(space, key=simulated_speed, reverse=True)[:5]


def test_then_what_is_measured_leads() -> None:
    """Two devices that like opposite things, the same simulation: each is searched where it is fast."""
    space, budget = points(), RealBudget(seeds=3, runs=15)
    known: list[Candidate | None] = [  # of every third point the simulation tells nothing
        each if place % 3 else None for place, each in enumerate(all_known(space))
    ]

    def asked(best: str) -> list[Config]:
        found = searched(space, known, budget, lambda config: real_speed(config, best))
        assert len({id(each.config) for each in found}) == 15
        return [each.config for each in found[3:]]

    def share(configs: list[Config]) -> int:
        return sum(config.settings.activation_checkpointing == "full" for config in configs)

    full = asked("full")
    assert share(full) >= share(asked("none")) + 6
    assert asked("full") == full, "the same search twice tries the same points"


def test_what_does_not_fit_in_the_simulation_is_not_run() -> None:
    space = points()[:12]
    known: list[Candidate | None] = [candidate(config, 1.0, feasible=False) for config in space]
    known[3], known[5] = None, candidate(space[5], 2.0)
    found = searched(space, known, RealBudget(seeds=4, runs=12))
    assert [each.config for each in found] == [space[5], space[3]]


def test_no_run_begins_after_the_time_is_over() -> None:
    space = points()[:40]
    now = [100.0]

    def measure(config: Config) -> Candidate:
        now[0] += 7.0
        return candidate(config, real_speed(config))

    budget = RealBudget(seeds=1, seconds=20.0)
    found = search_measured(space, all_known(space), [2], budget, 0, measure, clock=lambda: now[0])
    assert len(found) == 3
    assert next(iter(found)) == 2


def test_agreement_is_that_of_the_ranks() -> None:
    space = points()[:4]
    measured = [candidate(config, speed) for config, speed in zip(space, (4.0, 3.0, 2.0, 1.0), strict=True)]
    backwards = [candidate(config, speed) for config, speed in zip(space, (1.0, 2.0, 3.0, 9.0), strict=True)]
    assert rank_agreement(list(zip(measured, measured, strict=True))) == pytest.approx(1.0)
    assert rank_agreement(list(zip(backwards, measured, strict=True))) == pytest.approx(-1.0)
    assert rank_agreement(list(zip(measured[:2], measured[:2], strict=True))) is None
    assert rank_agreement([(None, each) for each in measured]) is None


def test_the_first_of_several_runs_can_be_told_again() -> None:
    runs = [
        Result.of({"status": "ok", "step_time_s": step, "tokens_per_s_per_gpu": 12 / step, "mfu": None})
        for step in (2.0, 3.0, 4.0)
    ]
    together = merged(runs[0], runs[1:])
    assert together.step_time_s == 3.0
    told = first_run(together)
    assert told.step_time_s == 2.0
    assert told.tokens_per_s_per_gpu == pytest.approx(6.0)
    assert first_run(runs[1]) == runs[1]
