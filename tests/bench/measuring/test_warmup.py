"""Warm-up ends when step times are stable, or at its bound."""

from __future__ import annotations

from fsdpbench.config import Measurement
from fsdpbench.measured import measured, spread
from fsdpbench.warmup import is_stable, warm_up


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
    simulated = Measurement.default_for("sim")
    assert simulated.most_warmup_steps <= simulated.warmup_steps


def test_fewer_steps_than_the_window_are_not_stable() -> None:
    assert not is_stable([1.0, 1.0])
    assert is_stable([7.0, 1.0, 1.0, 1.0])


def test_raw_samples_and_overhead_are_those_of_the_slowest_rank() -> None:
    fast = {"step_times_s": [1.0, 1.0, 1.0], "profiler_step_times_s": [9.0]}
    slow = {"step_times_s": [2.0, 1.0, 2.0], "profiler_step_times_s": [2.5, 2.5], "warmup_stable": True}
    found = measured([fast, slow])
    assert found is not None
    assert found["step_times_s"] == [2.0, 1.0, 2.0]
    assert found["profiler_overhead"] == 0.25
    assert found["warmup_stable"] is True
    assert measured([{"step_times_s": []}]) is None


def test_spread_is_the_distance_of_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == (4.0 - 2.0) / 3.0
    assert spread([1.0]) is None
