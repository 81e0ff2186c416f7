"""What nothing beats: the front of speed against memory."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from fsdpbench.answers.tune.front import Candidate, Goal, judge, pareto
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.cli.commands.tune import parse_memory
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.result import Result

CONFIG = Config(
    model="gpt-tiny", shape={}, system="impl-fsdp2", device="sim", hardware="a100-80gb", gpus=8,
    gpus_per_node=8, settings=Settings.of(), measurement=Measurement.default_for("sim"),
)  # fmt: skip


def candidate(speed: float, memory: int, feasible: bool = True) -> Candidate:
    return Candidate(CONFIG, Status.OK, speed, memory, feasible)


def test_the_front_is_that_of_brute_force() -> None:
    drawn = random.Random(7)
    for _ in range(50):
        tried = [candidate(drawn.randint(1, 9), drawn.randint(1, 9), drawn.random() > 0.2) for _ in range(12)]
        fit = [(c.speed, c.memory) for c in tried if c.feasible]
        better = {
            (one, two)
            for one, two in itertools.product(fit, fit)
            if one != two and one[0] >= two[0] and (one[1] or 0) <= (two[1] or 0)
        }
        expected = sorted(
            {point for point in fit if not any(two == point for _, two in better)}, reverse=True
        )
        assert [(c.speed, c.memory) for c in pareto(tried)] == expected


@pytest.mark.parametrize(
    ("result", "limit", "feasible"),
    [
        ({"status": "ok", "mfu": 0.5, "peak_memory_bytes": {"reserved": 10}}, None, True),
        ({"status": "ok", "mfu": 0.5, "peak_memory_bytes": {"reserved": 10}}, 10, True),
        ({"status": "ok", "mfu": 0.5, "peak_memory_bytes": {"reserved": 11}}, 10, False),
        ({"status": "oom", "mfu": None}, None, False),
        ({"status": "ok", "mfu": 0.5, "peak_memory_bytes": None}, 10, True),
    ],
)
def test_a_candidate_is_feasible_within_the_limit(
    result: dict[str, Any], limit: int | None, feasible: bool
) -> None:
    assert judge(CONFIG, Result.of(result), Goal("mfu", limit)).feasible is feasible


def test_sizes_of_memory_as_people_write_them() -> None:
    assert parse_memory("80GB") == 80 * 10**9
    assert parse_memory("40 GiB") == 40 * 2**30
    assert parse_memory("1.5e9") == 1_500_000_000
    assert parse_memory(None) is None
    for wrong in ("many", "80TBs", "-1GB", "GB", "80"):
        with pytest.raises(UsageError, match="80GB"):
            parse_memory(wrong)
