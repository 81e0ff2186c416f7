"""Waiting for slow ranks apart from transfer, over traces of several ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fsdpbench.reports.analysis import Analysis, analyze
from fsdpbench.reports.analysis.text import describe


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


MESH = {"shard": ((0, 1), (2, 3)), "replicate": ((0, 2), (1, 3))}


def mesh_job(tmp_path: Path, builder: Any, delay: dict[int, int], rounds: int = 20) -> Analysis:
    """Each round a reduce-scatter in the shard group, then an all-reduce in the replicate group, of ranks
    that begin the round `delay` ns late; a rank goes on when its collective is done."""
    transfer = 2_000
    built = {}
    now = {}
    for rank in range(4):
        built[rank] = builder()
        built[rank].head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
        now[rank] = 1_000_000 + rank * 77_777_777
        built[rank].step(0, now[rank], now[rank] + rounds * 100_000)
    true = dict.fromkeys(range(4), 0)
    for _ in range(rounds):
        true = {rank: max(true.values()) + delay.get(rank, 0) for rank in true}
        for kind, dimension in (("reduce_scatter", "shard"), ("all_reduce", "replicate")):
            for group in MESH[dimension]:
                end = max(true[rank] for rank in group) + transfer
                for rank in group:
                    started = now[rank] + true[rank]
                    built[rank].collective(
                        kind,
                        started,
                        now[rank] + end,
                        launch=started - 100,
                        elements=80,
                        ranks=2,
                        **{"Process Group Name": dimension, "Process Group Ranks": str(list(group))},
                    )
                    true[rank] = end
    for rank in range(4):
        built[rank].write(tmp_path / f"rank{rank}_trace.json")
    return analyze([tmp_path])


def test_on_a_mesh_the_blame_goes_back_to_the_slow_rank(tmp_path: Path, trace_builder: Any) -> None:
    """Rank 3 is slow: 2 waits for it among the shards, and 0 then for 2 among the replicas, 1 for 3."""
    analysis = mesh_job(tmp_path, trace_builder, {3: 20_000})
    summary = analysis.across_ranks
    assert summary is not None
    assert summary.waiting is not None
    waiting = summary.waiting
    assert waiting.matched == 4 * 20
    assert {group.group: group.waited for group in waiting.groups} == {
        "ranks 0,1": {0: 0, 1: 0},
        "ranks 2,3": {2: 20 * 20_000, 3: 0},
        "ranks 0,2": {0: 20 * 20_000, 2: 0},
        "ranks 1,3": {1: 20 * 20_000, 3: 0},
    }
    assert waiting.caused == {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}
    assert waiting.straggler == 3
    assert "among ranks 2,3: 20 collectives, waited rank 2 0.400 ms, rank 3 0.000 ms" in describe(analysis)
    printed = analysis.to_dict()["across_ranks"]["waiting_for_ranks"]
    assert len(printed["communicators"]) == 4


def test_two_slow_ranks_on_a_mesh_share_the_blame(tmp_path: Path, trace_builder: Any) -> None:
    """0 and 3 are equally slow: 1 waits for 0, 2 for 3; among the replicas all come at the same time."""
    summary = mesh_job(tmp_path, trace_builder, {0: 20_000, 3: 20_000}).across_ranks
    assert summary is not None
    assert summary.waiting is not None
    assert summary.waiting.caused == {0: 0.5, 1: 0.0, 2: 0.0, 3: 0.5}
    assert summary.waiting.straggler is None


def test_a_communicator_that_does_not_match_leaves_the_others(tmp_path: Path, trace_builder: Any) -> None:
    mesh_job(tmp_path, trace_builder, {3: 20_000})
    built = trace_builder()
    built.head["distributedInfo"] = {"backend": "nccl", "rank": 1, "world_size": 4}
    built.collective("all_reduce", 1_000_000, 1_100_000, elements=80, ranks=2)
    for event in built.events:
        if event["args"].get("Process Group Name"):
            event["args"]["Process Group Ranks"] = "[0, 1]"
    built.write(tmp_path / "rank1_trace.json")
    analysis = analyze([tmp_path])
    summary = analysis.across_ranks
    assert summary is not None
    assert summary.waiting is not None
    assert summary.waiting.unmatched == ("ranks 0,1",)
    assert {group.group for group in summary.waiting.groups} == {"ranks 2,3", "ranks 0,2"}
    assert "among ranks 0,1: the ranks' collectives differ" in describe(analysis)
