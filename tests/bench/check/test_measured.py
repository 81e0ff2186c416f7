"""Measured figures, on a recorded pool of real runs: few false alarms, and a slowdown is found."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from fsdpbench.answers.check.compare import Comparison, Verdict, compare, diagnose
from fsdpbench.answers.check.records import entries
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.text import as_text
from fsdpbench.answers.check.thresholds import Measured, Thresholds, measure_noise
from fsdpbench.base.errors import CannotJudgeError

Run = Mapping[str, float | None]
MakeEntry = Callable[[list[Run]], Entry]

RUNS = 60
"""A side. The pool's machine was busy with other work, and a run's fastest step varies by a fifth."""

COMPARISONS = 100


def slowed(run: Run, factor: float) -> Run:
    return {name: value * factor if value is not None else None for name, value in run.items()}


def resampled(pool: list[Run], measured: MakeEntry, factor: float) -> list[Comparison]:
    """Comparisons of two sides drawn from the pool, the second one `factor` slower."""
    generator = np.random.default_rng(2024)
    found = []
    # What speaks against a run is found once for all the sides that it is drawn into.
    thresholds, own = Thresholds(measured=Measured(level=0.01)), entries.contradictions
    with pytest.MonkeyPatch.context() as patch:
        known = functools.cache(lambda device, figures: own(device, dict(figures)))
        patch.setattr(entries, "contradictions", lambda device, run: known(device, tuple(run.items())))
        for _ in range(COMPARISONS):
            sides = generator.choice(len(pool), (2, RUNS))
            before, after = ([pool[index] for index in side] for side in sides)
            drawn = measured(before), measured([slowed(run, factor) for run in after])
            found.append(compare({"a": drawn[0]}, {"a": drawn[1]}, thresholds))
    return found


def test_equal_code_raises_at_most_4_alarms_in_100(pool: list[Run], measured: MakeEntry) -> None:
    alarms = [each for each in resampled(pool, measured, 1.0) if each.regressions]
    assert len(alarms) <= 4


def test_a_tenth_slower_is_found_in_9_of_10(pool: list[Run], measured: MakeEntry) -> None:
    found = [each for each in resampled(pool, measured, 1.1) if each.regressions]
    assert len(found) >= 0.9 * COMPARISONS
    assert {finding.cause for finding in diagnose(found[0])} == {"slower_step"}


def test_a_tenth_faster_is_no_regression(pool: list[Run], measured: MakeEntry) -> None:
    every = resampled(pool, measured, 1 / 1.1)
    assert sum(bool(each.regressions) for each in every) == 0
    assert sum(bool(each.of(Verdict.BETTER)) for each in every) >= 0.9 * COMPARISONS


def test_a_certain_change_below_the_minimum_effect_is_none(measured: MakeEntry) -> None:
    quiet = [{"step_time_s": 1.0 + 1e-4 * k} for k in range(20)]
    entries = {"a": measured(quiet)}, {"a": measured([slowed(run, 1.02) for run in quiet])}
    (change,) = compare(*entries, Thresholds()).changes
    assert change.verdict is Verdict.NOISE
    assert change.chance is not None
    assert change.chance < 1e-6
    (strict,) = compare(*entries, Thresholds(measured=Measured(minimum_effect={"step_time_s": 0.01}))).changes
    assert strict.verdict is Verdict.WORSE
    assert strict.relative == pytest.approx(0.02, abs=1e-3)


def test_too_few_runs_cannot_judge(pool: list[Run], measured: MakeEntry) -> None:
    few = compare({"a": measured(pool[:2])}, {"a": measured(pool[2:4])}, Thresholds())
    assert [change.metric for change in few.of(Verdict.UNKNOWN)] == ["step_time_s", "fastest_step_s"]
    assert re.search(r"at least 6 a side.*--repeat 6", few.unjudged[0])
    assert not compare({"a": measured(pool[:6])}, {"a": measured(pool[6:12])}, Thresholds()).unjudged


def test_counts_that_agree_in_all_runs_are_exact(measured: MakeEntry) -> None:
    runs: list[Run] = [{"step_time_s": 1 + k / 100, "all_gather_count": 9} for k in range(10)]
    more: list[Run] = [{**run, "all_gather_count": 10} for run in runs]
    comparison = compare({"a": measured(runs)}, {"a": measured(more)}, Thresholds())
    (change,) = comparison.regressions
    assert (change.metric, change.before, change.after, change.chance) == ("all_gather_count", 9, 10, None)
    assert "1 more all-gathers a step" in as_text(comparison)


def test_noise_sets_thresholds_that_equal_code_stays_below(pool: list[Run], measured: MakeEntry) -> None:
    noise = measure_noise({"a": measured(pool[:40])})
    least = noise.minimum_effects()
    assert noise.runs == 40
    assert set(least) == {"step_time_s", "fastest_step_s"}
    # A busy machine: its thresholds are above the usual ones, and rounded up.
    assert all(0.03 <= least[name] < 0.5 and least[name] >= noise.effects[name] for name in least)
    quiet = measure_noise({"a": measured([{"step_time_s": 1 + 1e-5 * k} for k in range(20)])})
    assert quiet.minimum_effects() == {"step_time_s": 0.03}


def test_noise_of_exact_or_few_runs_cannot_be_measured(pool: list[Run], measured: MakeEntry) -> None:
    with pytest.raises(CannotJudgeError, match="exact"):
        measure_noise({"a": Entry(measured(pool[:1]).status, "sim", (pool[0],))})
    with pytest.raises(CannotJudgeError, match="--repeat 6"):
        measure_noise({"a": measured(pool[:5])})


def test_many_metrics_do_not_multiply_alarms(measured: MakeEntry) -> None:
    """A change that is one alone is none among ten configurations."""
    before: list[Any] = [{"step_time_s": 1.0 + k / 10} for k in range(12)]
    after = [slowed(run, 1.4) for run in before]
    alone = compare({"a": measured(before)}, {"a": measured(after)}, Thresholds())
    many = compare(
        {str(k): measured(before) for k in range(10)},
        {"0": measured(after), **{str(k): measured(before) for k in range(1, 10)}},
        Thresholds(),
    )
    assert len(alone.regressions) == 1
    assert many.regressions == ()
