"""The order of the rows, near ties, the Pareto front, and what varies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpbench.reports.pages.ranking import (
    SAMPLES,
    TOKENS,
    constant_settings,
    metric_of,
    pareto_front,
    rank,
    values_of,
    varying_settings,
)
from fsdpbench.reports.pages.recommendation import best_lines, interval_findings
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.result import ConfigFile, Interval, PeakMemory, Result
from fsdpbench.reports.result import Status as Ended

GIB = 2**30


def row(
    name: str,
    tokens: float | None = 100.0,
    memory: float | None = 10 * GIB,
    status: Status = Status.OK,
    **settings: object,
) -> Configuration:
    result = Result(
        status=Ended(status.value),
        step_time_s=1.0,
        tokens_per_s_per_gpu=tokens,
        samples_per_s_per_gpu=5.0,
        peak_memory_bytes=PeakMemory(reserved=memory),
    )
    return Configuration(Path(name), ConfigFile(settings={}, name=name), result, status, settings=settings)


def view(*rows: Configuration) -> RunView:
    return RunView(Path("run"), "run", rows)


def names(*rows: Configuration) -> list[str]:
    return [entry.row.name for entry in rank(view(*rows))]


def test_best_throughput_first_and_failures_below_by_status() -> None:
    rows = [
        row("slow", 50),
        row("crash", status=Status.CRASH),
        row("fast", 200),
        row("oom", status=Status.OOM),
    ]
    assert names(*rows) == ["fast", "slow", "oom", "crash"]
    ranked = rank(view(*rows))
    assert [entry.place for entry in ranked] == [1, 2, None, None]
    assert [entry.of_best for entry in ranked] == [1.0, 0.25, None, None]


def test_equal_throughput_is_decided_by_memory_then_name() -> None:
    assert names(row("b", memory=9 * GIB), row("c", memory=8 * GIB), row("a", memory=9 * GIB)) == [
        "c",
        "a",
        "b",
    ]


def test_samples_rank_where_a_finished_row_has_no_tokens() -> None:
    assert metric_of(view(row("a"), row("b"))) is TOKENS
    assert metric_of(view(row("a"), row("b", tokens=None))) is SAMPLES
    assert metric_of(view(row("a"), row("b", tokens=None, status=Status.OOM))) is TOKENS


def test_on_cpus_throughput_is_that_of_a_rank() -> None:
    def on(each: Configuration, device: str) -> Configuration:
        return replace(each, config=msgspec.structs.replace(each.config, device=device))

    both = [on(row("a"), "cpu"), on(row("b"), "cpu")]
    assert (metric_of(view(*both)).words, metric_of(view(*both)).each) == ("tokens/s/rank", "rank")
    assert metric_of(view(*both)).counts_tokens
    assert metric_of(view(both[0], on(row("b"), "sim"))).each == "GPU"
    without = [on(row("a", tokens=None), "cpu")]
    assert metric_of(view(*without)).words == "samples/s/rank"


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=14))
def test_the_pareto_front_by_brute_force(points: list[tuple[int, int]]) -> None:
    rows = [row(str(number), float(speed), memory * GIB) for number, (speed, memory) in enumerate(points)]
    front = {
        (entry.throughput, (entry.row.result.reserved or 0) / GIB)
        for entry in pareto_front(rank(view(*rows)))
    }
    beaten = {
        (s, m) for s, m in points if any((os >= s and om <= m) and (os, om) != (s, m) for os, om in points)
    }
    assert front == set(points) - beaten


def test_varying_and_constant_settings() -> None:
    rows = [
        row("a", wrap="block", batch=8, limit=2),
        row("b", wrap="root", batch=8),
        row("c", wrap="root", batch=8, limit=2),
    ]
    assert varying_settings(rows) == ["wrap"]
    assert constant_settings(rows) == {"batch": "8", "limit": "2 (where it applies)"}


def test_false_and_zero_are_different_values() -> None:
    assert varying_settings([row("a", x=False), row("b", x=0)]) == ["x"]


@pytest.mark.parametrize(
    ("values", "order"), [([10, 9, "off"], ["9", "10", "off"]), (["fp32", "bf16"], ["bf16", "fp32"])]
)
def test_values_are_listed_numbers_first_in_their_order(values: list[object], order: list[str]) -> None:
    assert values_of([row(str(value), x=value) for value in values], "x") == order


def simulated(name: str, tokens: float, apart: float = 0.05, **interval: object) -> Configuration:
    made = row(name, tokens)
    error = Interval(0.9, (0.9, 1.1), apart=apart, **interval)  # type: ignore[arg-type]
    return replace(made, result=msgspec.structs.replace(made.result, interval=error))


def test_rows_without_a_clear_difference_share_a_rank() -> None:
    rows = [simulated("a", 100), simulated("b", 97), simulated("c", 80), row("failed", status=Status.OOM)]
    ranked = rank(view(*rows))
    assert [entry.place for entry in ranked] == [1, 2, 3, None]
    assert [entry.rank for entry in ranked] == [1, 1, 3, None]
    assert [entry.rank for entry in rank(view(row("x", 100), row("y", 100), row("z", 99)))] == [1, 2, 3]


def test_the_page_tells_what_is_risky() -> None:
    best = simulated("a", 100, risky=True, because=["memory is nearly full"], runs=50)
    (found,) = interval_findings(rank(view(best, simulated("b", 99))))
    assert found.startswith("1 of 2 is risky: memory fits only inside its error")
    assert found.endswith("(number 1).")
    assert interval_findings(rank(view(row("measured")))) == []


def test_a_single_difference_inside_its_interval_is_not_named() -> None:
    strategies = [(name, replace(simulated(name, speed), settings={"strategy": name})) for name, speed in (
        ("FULL_SHARD", 100), ("HYBRID_SHARD", 97), ("NO_SHARD", 80)
    )]  # fmt: skip
    near, far = [dict(strategies[:2]), dict(strategies[::2])]
    assert best_lines(view(*near.values()))[2].startswith("No setting changed throughput clearly")
    assert "NO_SHARD instead of FULL_SHARD: −20 % [−2" in best_lines(view(*far.values()))[2]
