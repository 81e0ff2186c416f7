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
    assert "ranks 1, 3 left none" in describe(verdict)
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


def _at(number: int, line: int, file: str = "main.py", **given: Any) -> dict[str, Any]:
    return entry(number, frames=[{"name": "step", "filename": f"/home/me/{file}", "line": line}], **given)


def test_parts_of_a_coalesced_call_have_no_state_of_their_own(write_dumps: WriteDumps) -> None:
    """torch records them without events: they stay scheduled, and the closing call is completed."""
    done = [entry(1, "_all_gather_base", **PENDING), entry(1, "coalesced", input_sizes=[], output_sizes=[])]
    assert culprit(judge(write_dumps({0: dump(done, 2), 1: dump(done, 2)}))).startswith("none")
    open_ = [entry(1, "_all_gather_base", **PENDING), entry(1, "coalesced", state="started")]
    assert "all ranks joined" in culprit(judge(write_dumps({0: dump(open_, 2), 1: dump(open_, 2)})))
    stalled = [*done, entry(2, "all_reduce", state="started")]
    said = culprit(judge(write_dumps({0: dump(stalled, 2), 1: dump(stalled, 2)})))
    assert said.startswith("all ranks joined all_reduce(4 x 8 Float) at train.py:12, collective 2")


def test_a_call_of_one_rank_alone_is_found_by_its_line(write_dumps: WriteDumps) -> None:
    usual = dump([_at(8, 31), _at(9, 90)])
    ahead = dump([_at(8, 31), _at(9, 40, "save.py"), _at(10, 90, state="started")])
    assert culprit(judge(write_dumps({0: ahead, 1: usual, 2: usual}))) == (
        "rank 0 is off by one: its collective 9 of group default_pg comes from save.py:40, "
        "that of ranks 1, 2 from main.py:90"
    )


def test_two_candidates_are_named_where_lines_do_not_decide(write_dumps: WriteDumps) -> None:
    usual = dump([_at(8, 31), _at(9, 50)])
    ahead = dump([_at(8, 31), _at(9, 40, "save.py"), _at(10, 90, state="started")])
    said = culprit(judge(write_dumps({0: ahead, 1: usual, 2: usual})))
    assert said.startswith(
        "cannot tell: either ranks 1, 2 never joined all_reduce(4 x 8 Float) at main.py:90"
    )
    assert "parted before: collective 9 of group default_pg of rank 0 comes from save.py:40" in said


def test_branches_of_a_program_are_no_parting(write_dumps: WriteDumps) -> None:
    """Rank 0 calls its broadcasts from another line, in every step."""
    ahead = dump([_at(1, 10), _at(2, 20), _at(3, 10), _at(4, 20), _at(5, 30, state="started")])
    usual = dump([_at(1, 11), _at(2, 20), _at(3, 11), _at(4, 20)])
    assert culprit(judge(write_dumps({0: ahead, 1: usual, 2: usual}))).startswith("ranks 1, 2 never joined")


def test_two_groups_in_opposite_order_are_a_cycle(write_dumps: WriteDumps) -> None:
    def calls(first: str, second: str) -> dict[str, Any]:
        members = {name: {"name": name, "desc": f"mesh_{name}", "ranks": "[0, 1]"} for name in "ab"}
        each = [(name, (name, f"mesh_{name}")) for name in (first, second)]
        entries = [
            entry(number, process_group=group, collective_seq_id=5, state=state)
            for number, ((_, group), state) in enumerate(zip(each, ("started", "scheduled"), strict=True), 1)
        ]
        return dump(entries, 2, pg_config=members)

    said = culprit(judge(write_dumps({0: calls("a", "b"), 1: calls("b", "a")})))
    assert said.startswith("two groups in opposite order: rank 0 began with all_reduce(4 x 8 Float)")
    assert "of group mesh_a, rank 1 with all_reduce" in said


def test_the_end_of_a_batch_of_sends_is_no_collective(write_dumps: WriteDumps) -> None:
    """In older torch it is not marked as point-to-point, and has the number of the collective before."""
    batch = [entry(1, "send 0->1", is_p2p=True), entry(1, "coalesced", input_sizes=[], output_sizes=[])]
    sends, other = dump([entry(1), *batch, entry(2)]), dump([entry(1), entry(2)])
    assert culprit(judge(write_dumps({0: sends, 1: sends, 2: other}))).startswith("none")
