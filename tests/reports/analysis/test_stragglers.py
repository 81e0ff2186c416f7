"""Waiting for slow ranks apart from transfer, over traces of several ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from reports.analysis import Analysis, analyze
from reports.analysis.text import describe


def job(tmp_path: Path, builder: Any, joins: list[list[int]], transfer: int = 2_000) -> Analysis:
    """One collective a list of arrival times (ns after its turn), one of them a rank; the clocks differ."""
    for rank in range(len(joins[0])):
        built = builder()
        built.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": len(joins[0])}
        skew = 1_000_000 + rank * 77_777_777
        built.step(0, skew, skew + len(joins) * 100_000)
        for number, arrivals in enumerate(joins):
            turn = skew + number * 100_000
            end = turn + max(arrivals) + transfer
            start = turn + arrivals[rank]
            built.collective("all_reduce", start, end, launch=turn, elements=80)
        built.write(tmp_path / f"rank{rank}_trace.json")
    return analyze([tmp_path])


def test_the_rank_that_always_comes_last_is_named(tmp_path: Path, trace_builder: Any) -> None:
    rng = random.Random(2)
    joins = [[rng.randrange(10, 500), rng.randrange(10, 500), 20_000, 300] for _ in range(20)]
    analysis = job(tmp_path, trace_builder, joins)
    summary = analysis.across_ranks
    assert summary is not None
    assert summary.waiting is not None
    waiting = summary.waiting
    assert waiting.matched == 20
    assert waiting.straggler == 2
    assert waiting.caused[2] == 1.0
    expected = [sum(max(each) - each[rank] for each in joins) for rank in range(4)]
    assert waiting.waited == dict(enumerate(expected))
    printed = analysis.to_dict()["across_ranks"]
    assert printed["straggler"] == 2
    assert printed["waiting_for_ranks"]["waited_s"]["2"] == 0.0
    assert "rank 2 is the last to join" in describe(analysis)


def test_ranks_that_take_turns_are_no_stragglers(tmp_path: Path, trace_builder: Any) -> None:
    joins = [[20_000 if rank == number % 4 else 100 for rank in range(4)] for number in range(20)]
    summary = job(tmp_path, trace_builder, joins).across_ranks
    assert summary is not None
    assert summary.waiting is not None
    assert summary.waiting.straggler is None


def test_a_little_waiting_is_not_worth_a_name(tmp_path: Path, trace_builder: Any) -> None:
    summary = job(tmp_path, trace_builder, [[10, 10, 200, 10]] * 20).across_ranks
    assert summary is not None
    assert summary.waiting is not None
    assert summary.waiting.straggler is None


def test_ranks_with_unlike_collectives_are_not_compared(tmp_path: Path, trace_builder: Any) -> None:
    job(tmp_path, trace_builder, [[10, 20_000]] * 3)
    built = trace_builder()
    built.head["distributedInfo"] = {"backend": "nccl", "rank": 1, "world_size": 2}
    built.collective("all_gather", 1_000_000, 1_100_000, elements=80)
    built.write(tmp_path / "rank1_trace.json")
    summary = analyze([tmp_path]).across_ranks
    assert summary is not None
    assert summary.waiting is None
