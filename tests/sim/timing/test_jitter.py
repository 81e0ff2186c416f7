"""Seeded noise: reproducible, off by default, and of the size that its settings say."""

from __future__ import annotations

from functools import partial
from statistics import mean, pstdev

import pytest

from fsdpbench.base.configuration.config import JitterSettings
from fsdpbench.base.errors import UsageError
from fsdpbench.sim.followers.jitter import Jitter
from fsdpbench.sim.model.timeline import Work


def step_times(jitter: JitterSettings | None) -> list[int]:
    """Nanoseconds of three training steps under FSDP2."""
    from device_training import build, start

    sim = start(jitter=jitter)
    step = build("fsdp2", 8, tokens_shape=(256, 512))
    step()
    step()
    times = []
    for _ in range(3):
        sim.synchronize()
        began = sim.cpu_ns()
        step()
        sim.synchronize()
        times.append(sim.cpu_ns() - began)
    return times


@pytest.mark.campaign
@pytest.mark.simulated
def test_a_seed_changes_steps_and_repeats_exactly() -> None:
    from device_training import in_new_process

    exact = in_new_process(partial(step_times, None))
    first, second = (in_new_process(partial(step_times, JitterSettings(1))) for _ in range(2))
    assert first == second
    assert len(set(exact)) == 1
    assert len(set(first)) == 3
    assert first != in_new_process(partial(step_times, JitterSettings(2)))


@pytest.mark.simulated
def test_no_noise_is_no_change_and_a_straggler_makes_all_wait() -> None:
    from device_training import in_new_process

    exact = in_new_process(partial(step_times, None))
    quiet = JitterSettings(1, kernels=0, arrival_us=0)
    assert in_new_process(partial(step_times, quiet)) == exact
    slow = in_new_process(partial(step_times, JitterSettings(1, kernels=0, arrival_us=0, straggler=1.0)))
    assert slow[0] > exact[0]
    assert len(set(slow)) == 1


def test_kernels_vary_by_what_was_asked() -> None:
    jitter = Jitter(JitterSettings(5, kernels=0.05))
    drawn = [jitter.drawn_ns(Work.COMPUTE, 1_000_000) for _ in range(4000)]
    assert mean(drawn) == pytest.approx(1_000_000, rel=0.005)
    assert pstdev(drawn) == pytest.approx(50_000, rel=0.05)
    assert min(drawn) > 800_000


def test_the_last_of_many_is_later_than_the_last_of_few() -> None:
    def waited(ranks: int) -> float:
        jitter = Jitter(JitterSettings(5, arrival_us=100))
        return mean(jitter.lateness_ns(ranks) for _ in range(2000))

    assert waited(1) == 0
    # Normal draws: the greatest of 7 lies 1.35 deviations above the mean, of 511 about 3.04.
    assert waited(8) == pytest.approx(135_000 + 15_000, rel=0.2)
    assert waited(512) == pytest.approx(304_000, rel=0.05)


def test_a_straggler_is_waited_for_once_for_what_was_computed() -> None:
    jitter = Jitter(JitterSettings(5, kernels=0, arrival_us=0, straggler=0.1))
    jitter.drawn_ns(Work.COMPUTE, 1000)
    jitter.drawn_ns(Work.COPY, 5000)
    assert jitter.lateness_ns(8) == 100
    assert jitter.lateness_ns(8) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernels=0.1", "no seed"),
        ("seed=1,karnels=2", "unknown 'karnels'"),
        ("fast", "is not a number"),
        ("1,kernels=3", "kernels=3.0"),
        ("seed=1,straggler=nan", "straggler=nan"),
    ],
)
def test_what_is_no_jitter_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        JitterSettings.parse(text)


@pytest.mark.parametrize("seed", [7, 1234567890123])
def test_a_text_and_back(seed: int) -> None:
    settings = JitterSettings.parse(f"{seed}, kernels=0.03, straggler=0.0123456789")
    assert settings == JitterSettings(seed, kernels=0.03, straggler=0.0123456789)
    assert JitterSettings.parse(settings.to_text()) == settings
