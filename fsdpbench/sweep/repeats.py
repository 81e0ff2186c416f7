"""Repetitions of a configuration: the run is the replicate, and a step only a sample within it.

Steps of one run share what that run happened to get (its processes' places, the clocks, the page cache), so
that the spread between runs is the one that counts. Runs of all configurations are interleaved, every second
round backwards, so that a drift of the machine meets all of them alike:

    round 1   A B C      round 2   C B A      round 3   A B C
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fsdpbench.configuration.config import Config
from fsdpbench.results.records import Status
from fsdpbench.results.result import spread

_PER_SECOND = (
    "samples_per_s_per_gpu",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
)


@dataclass(frozen=True)
class Run:
    """The `number`-th run of a configuration, from 1."""

    config: Config
    number: int = 1


def interleaved(points: Sequence[Config], repeat: int) -> list[Run]:
    """Every run of every point in the order in which they take place."""
    runs: list[Run] = []
    for number in range(1, repeat + 1):
        order = points if number % 2 else tuple(reversed(points))
        runs += [Run(config, number) for config in order]
    return runs


def merged(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a configuration over all of its runs, on top of that of its first one.

    `step_time_s` becomes the median over runs, rates follow it; everything else stays the first run's.
    `repeats` keeps each run's step time and samples. May be applied to its own output again.
    """
    earlier = first.get("repeats") or {}
    own_step = earlier["step_time_s"][0] if earlier else first["step_time_s"]
    own_samples = earlier["samples_s"][0] if earlier else _samples(first)
    succeeded = [result for result in others if Status(result["status"]) is Status.OK]
    steps = [own_step, *(result["step_time_s"] for result in succeeded)]
    together = median(steps)
    scale = first["step_time_s"] / together
    rates = {name: first[name] * scale for name in _PER_SECOND if first.get(name) is not None}
    return {
        **first,
        **rates,
        "step_time_s": together,
        "repeats": {
            "runs": len(others) + 1,
            "failed": len(others) - len(succeeded),
            "step_time_s": steps,
            "spread": spread(steps),
            "samples_s": [own_samples, *map(_samples, succeeded)],
        },
    }


def first_run(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result as it was after the first run alone: `merged` undone for step time and rates."""
    repeats = result.get("repeats")
    if not repeats:
        return dict(result)
    own = repeats["step_time_s"][0]
    scale = result["step_time_s"] / own
    rates = {name: result[name] * scale for name in _PER_SECOND if result.get(name) is not None}
    return {**result, **rates, "step_time_s": own, "repeats": None}


def _samples(result: Mapping[str, Any]) -> list[float]:
    return list((result.get("measured") or {}).get("step_times_s") or [])
