"""Effects of settings: matched pairs, their means and intervals, what runs out of memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from fsdpbench.reports.pages.effects import Effect, effects
from fsdpbench.reports.pages.ranking import rank
from fsdpbench.reports.pages.recommendation import best_sentence
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.result import ConfigFile, PeakMemory, Result
from fsdpbench.reports.result import Status as Ended


def row(
    throughput: float | None, memory: float = 10.0, retries: float = 0, **settings: object
) -> Configuration:
    status = Status.OK if throughput else Status.OOM
    result = Result(
        status=Ended(status.value),
        tokens_per_s_per_gpu=throughput,
        peak_memory_bytes=PeakMemory(reserved=memory),
        alloc_retries_per_step=retries,
    )
    name = ",".join(f"{key}={value}" for key, value in settings.items())
    return Configuration(Path(name), ConfigFile(settings={}, name=name), result, status, settings=settings)


def effects_of(*rows: Configuration) -> list[Effect]:
    return effects(rank(RunView(Path("run"), "run", rows)))


def test_multiplicative_effects_are_found_exactly_and_sorted_by_strength() -> None:
    factors = {
        "prefetch": {"pre": 1.0, "none": 0.9},
        "dtype": {"bf16": 1.0, "fp32": 0.5},
        "limit": {"2": 1.0, "off": 1.0},
    }
    rows = []
    for values in itertools.product(*(factors[name].items() for name in factors)):
        settings = {name: value for name, (value, _) in zip(factors, values, strict=True)}
        rows.append(row(100 * math.prod(factor for _, factor in values), **settings))
    found = effects_of(*rows)
    assert [(effect.name, effect.value, effect.pairs) for effect in found] == [
        ("dtype", "fp32", 4),
        ("prefetch", "none", 4),
        ("limit", "off", 4),
    ]
    assert [effect.ratio for effect in found] == pytest.approx([0.5, 0.9, 1.0])
    assert [(effect.low, effect.high) for effect in found] == [pytest.approx((r, r)) for r in (0.5, 0.9, 1.0)]


def test_the_interval_is_students_over_the_logarithms() -> None:
    ratios = [0.8, 0.9, 0.95, 0.7]
    rows = [row(100 + batch, x="a", batch=batch) for batch in range(4)]
    rows += [row((100 + batch) * ratio, x="b", batch=batch) for batch, ratio in enumerate(ratios)]
    (effect,) = (effect for effect in effects_of(*rows) if effect.name == "x")
    logs = [math.log(ratio) for ratio in ratios]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    assert (effect.low, effect.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert (effect.smallest, effect.largest) == pytest.approx((0.7, 0.95))


def test_only_pairs_that_differ_in_nothing_else_count() -> None:
    rows = [row(100, x="a", y=1), row(80, x="b", y=2), row(90, x="b", y=1)]
    (effect,) = (effect for effect in effects_of(*rows) if effect.name == "x")
    assert effect.pairs == 1
    assert effect.ratio == pytest.approx(0.9)
    assert (effect.low, effect.high) == (None, None)


def test_systems_are_compared_over_the_settings_that_both_have() -> None:
    rows = [
        row(100, system="one", wrap="block", limit=2, handover="record_stream"),
        row(70, system="one", wrap="root", limit=2, handover="record_stream"),
        row(95, system="two", wrap="block", handover="events"),
        row(60, system="two", wrap="root", handover="events"),
    ]
    by_name = {effect.name: effect for effect in effects_of(*rows)}
    assert by_name["wrap"].pairs == 2
    assert "system" not in by_name or by_name["system"].pairs == 0
    same = [replace(each, settings={**each.settings, "handover": "events"}) for each in rows]
    by_name = {effect.name: effect for effect in effects_of(*same)}
    assert by_name["system"].pairs == 2
    assert by_name["system"].ratio == pytest.approx(math.sqrt(95 / 100 * 60 / 70))


def test_a_value_that_runs_out_of_memory_is_counted_not_averaged() -> None:
    rows = [row(100, x="a", y=1), row(None, x="b", y=1), row(90, x="a", y=2), row(45, 20.0, x="b", y=2)]
    (effect,) = (effect for effect in effects_of(*rows) if effect.name == "x")
    assert (effect.pairs, effect.out_of_memory) == (1, 1)
    assert effect.ratio == pytest.approx(0.5)
    assert effect.memory == pytest.approx(2.0)


def test_nothing_finished_has_no_effects() -> None:
    assert effects_of(row(None, x="a"), row(None, x="b")) == []
    assert effects_of() == []


def test_what_only_one_system_has_stays_at_its_best_value_when_systems_are_compared() -> None:
    rows = [
        row(100, system="one", wrap="block", limit=2),
        row(50, system="one", wrap="block", limit="off"),
        row(70, system="one", wrap="root", limit=2),
        row(30, system="one", wrap="root", limit="off"),
        row(95, system="two", wrap="block"),
        row(60, system="two", wrap="root"),
    ]
    (effect,) = (each for each in effects_of(*rows) if each.name == "system")
    assert effect.pairs == 2
    assert effect.ratio == pytest.approx(math.sqrt(95 / 100 * 60 / 70))


def test_pairs_with_allocator_retries_are_told_apart() -> None:
    """Without retries y costs nothing; the dearer retries of y=1 would look like a loss."""
    rows = [row(100, x="a", y=0), row(100, x="a", y=1)]
    rows += [row(50, retries=1, x="b", y=0), row(25, retries=2, x="b", y=1)]
    by_name = {effect.name: effect for effect in effects_of(*rows)}
    y = by_name["y"]
    assert (y.ratio, y.pairs, y.with_retries) == (1.0, 1, False)
    assert (y.other_pairs, y.other_ratio) == (1, pytest.approx(0.5))
    x = by_name["x"]
    assert (x.pairs, x.with_retries, x.other_pairs) == (2, True, 0)
    assert x.ratio == pytest.approx(math.sqrt(0.5 * 0.25))
    sentence = best_sentence(RunView(Path("run"), "run", tuple(rows)))
    assert "x b instead of a: −65 % (allocator retries)." in sentence
    assert "y " not in sentence.split("most: ")[1]


def test_a_figure_that_no_run_has_leaves_no_bound_rather_than_an_error() -> None:
    rows = [row(100.0, x="a", batch=batch) for batch in range(3)]
    rows += [row(throughput, x="b", batch=batch) for batch, throughput in enumerate((1e308, 90.0, 90.0))]
    (effect,) = [found for found in effects_of(*rows) if found.name == "x"]
    assert effect.high is None


def test_a_batch_that_goes_with_checkpointing_does_not_part_the_pairs() -> None:
    """Each checkpointing has the batch that fits; batches of their own do part them."""
    modes = (("none", 8), ("op", 8), ("full", 32))
    rows = [
        row(speed * share, activation_checkpointing=mode, batch=batch, compile=compiled)
        for (mode, batch), speed in zip(modes, (100, 98, 80), strict=True)
        for compiled, share in ((True, 1.0), (False, 0.9))
    ]
    found = {
        effect.value: effect for effect in effects_of(*rows) if effect.name == "activation_checkpointing"
    }
    assert {value: (effect.pairs, effect.ratio) for value, effect in found.items()} == {
        "op": (2, pytest.approx(0.98)),
        "full": (2, pytest.approx(0.8)),
    }
    apart = [*rows, row(99, activation_checkpointing="none", batch=16, compile=True)]
    assert "full" not in {each.value for each in effects_of(*apart)}
