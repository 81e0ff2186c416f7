"""What is wanted of a configuration, and the front of those that nothing beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.configuration.config import Config
from fsdpbench.errors import unknown
from fsdpbench.results.records import Status

GOALS = {
    "tokens_per_s": "tokens_per_s_per_gpu",
    "samples_per_s": "samples_per_s_per_gpu",
    "tflops": "tflops_per_gpu",
    "mfu": "mfu",
}
"""What to search for, by the figure of the result that says it; more is better."""


@dataclass(frozen=True)
class Candidate:
    """One configuration that was tried: its speed (the goal's unit) and peak reserved memory (bytes, None
    where the device does not tell). `feasible`: it ran, and within the limit."""

    config: Config
    status: Status
    speed: float
    memory: int | None
    feasible: bool


def figure_of(goal: str) -> str:
    """The figure that `goal` names. Raises `UsageError`."""
    if goal not in GOALS:
        raise unknown("goal", goal, GOALS, "fsdpbench tune --help")
    return GOALS[goal]


def judge(config: Config, result: Mapping[str, Any], goal: str, limit: int | None) -> Candidate:
    """What `result` says of `config` under a memory limit in bytes."""
    status = Status(result["status"])
    speed = result.get(figure_of(goal)) or 0.0
    memory = (result.get("peak_memory_bytes") or {}).get("reserved")
    fits = limit is None or memory is None or memory <= limit
    return Candidate(config, status, speed, memory, status is Status.OK and fits and speed > 0)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The feasible candidates that no other equals in one of speed and memory and beats in the other,
    fastest first; of equals the first."""
    ranked = sorted(
        (candidate for candidate in candidates if candidate.feasible),
        key=lambda candidate: (-candidate.speed, candidate.memory or 0),
    )
    front: list[Candidate] = []
    for candidate in ranked:
        if not front or (candidate.memory or 0) < (front[-1].memory or 0):
            front.append(candidate)
    return front
