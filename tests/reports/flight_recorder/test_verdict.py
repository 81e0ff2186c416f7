"""Who did not join what, on dumps whose truth is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dump_writing import dump, entry

from fsdpbench.reports.analysis.flight_recorder import Verdict, describe, judge

if TYPE_CHECKING:
    from conftest import WriteDumps

PENDING: dict[str, Any] = {"state": "scheduled"}


def culprit(verdict: Verdict) -> str:
    return verdict.culprit


def test_a_rank_that_did_not_join_is_named(write_dumps: WriteDumps) -> None:
    waiting = [entry(1), entry(2), entry(3, "_all_gather_base", state="started")]
    verdict = judge(write_dumps({0: dump(waiting), 1: dump([entry(1), entry(2)]), 2: dump(waiting)}))
    assert culprit(verdict) == (
        "rank 1 never joined _all_gather_base(4 x 8 Float) at train.py:13, collective 3 of group default_pg, "
        "where ranks 0, 2 wait; its last there was all_reduce(4 x 8 Float) at train.py:12 (collective 2)"
    )
    text = describe(verdict)
    assert "/home/me/train.py:13 in main" in text
    assert text.index("/home/me/train.py:13") < text.index("site-packages/torch")
    (problem,) = verdict.to_dict()["flight_recorder"]["problems"]
    assert (problem["kind"], problem["sequence"], problem["ranks"]) == ("missing", 3, [1])
    assert problem["calls"]["0"][0]["frames"][0] == {
        "file": "/home/me/train.py", "line": 13, "function": "main",
    }  # fmt: skip


def test_calls_that_differ_are_named_before_what_hangs_after_them(write_dumps: WriteDumps) -> None:
    for changed, shown in (
        ({"profiling_name": "nccl:broadcast"}, "broadcast(4 x 8 Float)"),
        ({"input_sizes": [[4, 9]], "output_sizes": [[4, 9]]}, "all_reduce(4 x 9 Float)"),
        ({"input_dtypes": ["Half"], "output_dtypes": ["Half"]}, "all_reduce(4 x 8 Half)"),
    ):
        usual = dump([entry(1), entry(2, **PENDING)])
        odd = dump([entry(1), entry(2, **{**PENDING, **changed})])
        verdict = judge(write_dumps({0: usual, 1: usual, 2: odd}))
        assert culprit(verdict).startswith(
            f"rank 2 called {shown} at train.py:12 where rank 0 called all_reduce"
        )


def test_uneven_shards_are_no_difference(write_dumps: WriteDumps) -> None:
    def calls(rank: int) -> list[dict[str, Any]]:
        mine = [[3 + rank]]
        return [
            entry(1, "all_gather", input_sizes=mine, output_sizes=[[3], [4], [5]]),
            entry(2, "reduce_scatter", input_sizes=[[3], [4], [5]], output_sizes=mine),
            entry(3, "all_to_all", input_sizes=mine, output_sizes=mine),
            entry(
                4, "scatter", input_sizes=[[4]] * 3 if rank == 0 else [], input_dtypes=[], output_sizes=[[4]]
            ),
            entry(5, "gather", output_sizes=[[4]] * 3 if rank == 0 else [], input_sizes=[[4]]),
        ]

    verdict = judge(write_dumps({rank: dump(calls(rank)) for rank in range(3)}))
    assert not verdict.problems
    assert culprit(verdict).startswith("none:")


def test_ranks_without_a_dump_are_told(write_dumps: WriteDumps) -> None:
    verdict = judge(write_dumps({rank: dump([entry(1, **PENDING)], world=4) for rank in (0, 2)}))
    assert verdict.missing_dumps == (1, 3)
    assert "no dump of ranks 1, 3" in describe(verdict)
    assert "whether ranks 1, 3 joined it is not known" in culprit(verdict)


def test_what_has_left_the_buffer_is_not_missing(write_dumps: WriteDumps) -> None:
    """A rank records 3 calls at most; the slow one still holds older ones."""
    fast = dump([entry(number) for number in (3, 4, 5)])
    slow = dump([entry(number) for number in (2, 3, 4)])
    slow["entries"][-1]["state"] = "started"
    fast["entries"][-1]["state"] = "scheduled"
    verdict = judge(write_dumps({0: fast, 1: slow, 2: fast}))
    (problem,) = verdict.problems
    assert (problem.kind, problem.sequence, problem.ranks) == ("missing", 5, (1,))


def test_the_culprit_is_the_one_that_waits_for_nobody(write_dumps: WriteDumps) -> None:
    """Rank 1 misses the default group's collective, since it waits for rank 2 in another."""
    pair = {"process_group": ("1", "tp"), "state": "started"}
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "1": {"name": "1", "desc": "tp", "ranks": "[1, 2]"},
    }
    dumps = {
        0: dump([entry(1, **PENDING)], pg_config=config),
        1: dump([entry(1, **pair, time_created_ns=9_000)], pg_config=config),
        2: dump([], pg_config=config),
    }
    verdict = judge(write_dumps(dumps))
    assert len(verdict.problems) == 2
    assert culprit(verdict).startswith("rank 2 never joined")


def test_a_collective_that_all_joined_and_that_hangs(write_dumps: WriteDumps) -> None:
    started, scheduled = [entry(1), entry(2, state="started")], [entry(1), entry(2, state="scheduled")]
    verdict = judge(write_dumps({0: dump(started), 1: dump(scheduled), 2: dump(started)}))
    assert culprit(verdict).startswith("rank 1 has not started all_reduce(4 x 8 Float)")
    verdict = judge(write_dumps({rank: dump(started) for rank in range(3)}))
    assert "look at the network and the GPUs" in culprit(verdict)
    done = dump([entry(1), entry(2)])
    verdict = judge(write_dumps({0: done, 1: dump(started), 2: done}))
    assert "is not done on rank 1 alone" in culprit(verdict)


def test_parts_of_a_coalesced_call_share_a_number(write_dumps: WriteDumps) -> None:
    parts = [
        entry(1, "_all_gather_base"),
        entry(1, "_all_gather_base", output_sizes=[[7]]),
        entry(1, "coalesced"),
    ]
    fewer = [parts[0], parts[2]]
    assert not judge(write_dumps({rank: dump(parts) for rank in range(3)})).problems
    verdict = judge(write_dumps({0: dump(parts), 1: dump(fewer), 2: dump(parts)}))
    assert verdict.problems[0].ranks == (1,)


def test_point_to_point_calls_are_not_compared(write_dumps: WriteDumps) -> None:
    send = entry(1, "send 0->1", is_p2p=True, state="started")
    verdict = judge(write_dumps({0: dump([send], world=2), 1: dump([], world=2)}))
    assert not verdict.problems
    assert verdict.to_dict()["flight_recorder"]["ranks"][0]["point_to_point"] == 1
