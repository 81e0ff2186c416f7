"""Warm-up ends when step times are stable, or at its bound."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Measurement
from fsdpbench.engine.measuring.warmup import TimedSteps, is_stable, time_steps, warm_up
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.rank_record import RankRecord
from fsdpbench.reports.result_figures import Ran, measured, spread


@dataclass(frozen=True)
class Retried:
    """What an allocator had to do in a step."""

    alloc_retries: int


def run(times: list[float], least: int, most: int) -> tuple[int, bool | None]:
    left = iter(times)
    measurement = Measurement(least, 1, 1, timeout_s=1.0, most_warmup_steps=most)
    warm = warm_up(measurement, lambda: next(left))
    return len(warm.times_s), warm.stable


def test_it_stops_as_soon_as_the_last_steps_agree() -> None:
    assert run([9.0, 2.0, 1.0, 1.01, 1.02, 1.0], least=3, most=6) == (5, True)


def test_it_gives_up_at_its_bound_and_says_so() -> None:
    assert run([1.0, 2.0] * 10, least=3, most=8) == (8, False)


def test_an_exact_device_takes_the_steps_asked_for() -> None:
    assert run([5.0, 1.0], least=2, most=0) == (2, None)


def test_a_device_may_know_better_than_the_times() -> None:
    left = iter([5.0, 1.0, 7.0, 3.0])
    measurement = Measurement(2, 1, 1, timeout_s=1.0, most_warmup_steps=12)
    warm = warm_up(measurement, lambda: next(left), lambda times: len(times) == 3)
    assert warm.times_s == [5.0, 1.0, 7.0]
    assert warm.stable is True


def simulated(fsdpbench: Any, folder: Path, *more: str) -> dict[str, Any]:
    """The record of a run whose memory just suffices."""
    words = [
        "--model",
        "gpt-2.8b",
        "--device",
        "sim",
        "--gpus",
        "8",
        "--system",
        "impl-fsdp1",
        "--batch",
        "10",
    ]
    done = fsdpbench("run", *words, "--wrap", "block", "--reduce-dtype", "bf16", *more, "-o", str(folder))
    assert done.returncode == 0, done.stderr
    (record,) = (json.loads(path.read_text()) for path in folder.rglob("rank0_record.json"))
    return dict(record)


def test_simulated_steps_without_retries_have_settled_at_once(fsdpbench: Any, tmp_path: Path) -> None:
    record = simulated(fsdpbench, tmp_path / "run", "--limit-all-gathers", "2")
    assert record["warmup_stable"] is True
    assert (len(record["warmup_times_s"]), len(record["step_times_s"])) == (2, 1)


def test_simulated_steps_that_go_on_retrying_are_timed_more_often(fsdpbench: Any, tmp_path: Path) -> None:
    """Without the limiter each step's retry leaves the next one other segments: no step is like the last."""
    record = simulated(fsdpbench, tmp_path / "run", "--limit-all-gathers", "off")
    assert record["warmup_stable"] is False
    assert (len(record["warmup_times_s"]), len(record["step_times_s"])) == (12, 8)
    assert any(memory["alloc_retries"] for memory in record["memory_per_step"])


def test_steps_that_retry_alike_are_timed_more_often_and_never_called_stable() -> None:
    measurement = Measurement(2, 1, 1, timeout_s=1.0, most_warmup_steps=12, most_timed_steps=8)
    steps = TimedSteps(lambda: 1.0, lambda: Retried(2))
    warm = warm_up(measurement, steps.run, lambda times: True, steps.retried)
    assert (len(warm.times_s), warm.stable) == (2, False)
    assert time_steps(measurement, warm, steps).stable is False
    assert len(steps.times_s) == 2 + 8


def test_a_retry_that_begins_in_the_timed_step_makes_it_several() -> None:
    measurement = Measurement(2, 1, 1, timeout_s=1.0, most_warmup_steps=12, most_timed_steps=8)
    warm = warm_up(measurement, lambda: 1.0, lambda times: True)
    calm = TimedSteps(lambda: 1.0, lambda: Retried(0))
    assert time_steps(measurement, warm, calm).stable is True
    assert len(calm.times_s) == 1
    retries = iter([1, 0, 0, 0, 0, 0, 0, 0])
    retried = TimedSteps(lambda: 1.0, lambda: Retried(next(retries)))
    assert time_steps(measurement, warm, retried).stable is False
    assert len(retried.times_s) == 8


def test_fewer_steps_than_the_window_are_not_stable() -> None:
    assert not is_stable([1.0, 1.0])
    assert is_stable([7.0, 1.0, 1.0, 1.0])


def test_raw_samples_and_overhead_are_those_of_the_slowest_rank() -> None:
    fast = RankRecord.of(
        {"rank": 0, "world_size": 2, "device": "cpu"}
        | {"step_times_s": [1.0, 1.0, 1.0], "profiler_step_times_s": [9.0]}
    )
    slow = RankRecord.of(
        {"rank": 0, "world_size": 2, "device": "cpu"}
        | {"step_times_s": [2.0, 1.0, 2.0], "profiler_step_times_s": [2.5, 2.5], "warmup_stable": True}
    )
    found = measured(Ran([fast, slow], Analysis(ranks=(), configurations={})))
    assert found is not None
    assert found["step_times_s"] == [2.0, 1.0, 2.0]
    assert found["profiler_overhead"] == 0.25
    assert found["warmup_stable"] is True
    assert measured(Ran([RankRecord(0, 1, "cpu")], Analysis(ranks=(), configurations={}))) is None


def test_spread_is_the_distance_of_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == (4.0 - 2.0) / 3.0
    assert spread([1.0]) is None
