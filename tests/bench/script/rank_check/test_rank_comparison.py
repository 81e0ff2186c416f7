"""The first call in which ranks differ, on logs that are made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.configuration.script_source import spread_ranks
from fsdpbench.base.errors import UsageError
from fsdpbench.script.rank_check.calls import Call, Ended, Frame, Group, RankLog
from fsdpbench.script.rank_check.comparison import first_difference, sentence, to_dict

WORLD = Group((0, 1, 2, 3), description="default")
LEFT, RIGHT = Group((0, 1)), Group((2, 3))


def call(kind: str = "all_reduce", line: int = 1, group: Group = WORLD, **given: Any) -> Call:
    base = Call(group, kind, (4,), "4", "float32", "sum", None, (Frame("train.py", line, "main", True),))
    return base._replace(**given)


def log(rank: int, *calls: Call, **given: Any) -> RankLog:
    return RankLog(rank, list(calls), **given)


def described(*logs: RankLog) -> str | None:
    difference = first_difference(logs)
    return None if difference is None else sentence(difference)


def test_the_same_calls_are_no_difference() -> None:
    calls = [call(), call("barrier", sizes=()), call("all_gather", group=WORLD)]
    assert described(*(log(rank, *calls) for rank in range(4))) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "broadcast"}, "real ranks would hang here"),
        ({"sizes": (5,), "shown": "5"}, "hang here, or compute wrongly"),
        ({"dtype": "float64"}, "hang here, or compute wrongly"),
        ({"reduction": "max"}, "real ranks would compute wrongly"),
        ({"root": 1}, "hang here, or compute wrongly"),
    ],
)
def test_each_part_of_a_call_counts(changed: dict[str, Any], words: str) -> None:
    odd = call(line=31)._replace(**changed)
    message = described(log(0, call(line=29)), log(1, odd), log(2, call(line=29)))
    assert message is not None
    assert message.startswith("rank 1 calls")
    assert (
        "at train.py:31 where rank 0 calls all_reduce(4 float32, sum, group default) at train.py:29"
        in message
    )
    assert message.endswith(f"{words} (call 1 of the group)")


def test_the_odd_one_out_is_named_also_where_it_is_rank_0() -> None:
    message = described(log(0, call(sizes=(9,))), log(1, call()), log(3, call()))
    assert message is not None
    assert message.startswith("rank 0 calls")


def test_a_rank_that_calls_fewer_never_joins() -> None:
    message = described(log(0, call(), call("barrier", 7)), log(3, call()))
    assert message is not None
    assert message.startswith("rank 3 never joins barrier")
    assert "train.py:7" in message


def test_another_order_is_found_where_it_begins() -> None:
    first, second = call("all_gather", 5), call("all_reduce", 6)
    difference = first_difference([log(0, call(), first, second), log(1, call(), second, first)])
    assert difference is not None
    assert (difference.kind, difference.number) == ("kind", 1)


def test_ranks_of_different_groups_share_nothing() -> None:
    left = [call(group=LEFT, sizes=(1,)), call()]
    right = [call(), call(group=RIGHT, sizes=(2,)), call(group=RIGHT)]
    assert described(log(0, *left), log(1, *left), log(2, *right), log(3, *right)) is None


def test_calls_of_two_groups_may_come_in_any_order() -> None:
    assert described(log(0, call(), call(group=LEFT)), log(1, call(group=LEFT), call())) is None


def test_another_group_is_a_call_that_the_first_one_lacks() -> None:
    message = described(log(0, call(group=LEFT)), log(1, call()))
    assert message is not None
    assert "rank 1 never joins all_reduce(4 float32, sum, group of ranks 0, 1)" in message


def test_the_earliest_difference_of_all_groups_is_named() -> None:
    logs = [
        log(0, call(), call(group=LEFT, line=50)),
        log(1, call(sizes=(8,), line=10), call("barrier", group=LEFT, line=51)),
    ]
    message = described(*logs)
    assert message is not None
    assert "train.py:10" in message


def test_sizes_that_may_differ_are_not_compared() -> None:
    assert described(log(0, call("all_to_all", sizes=None)), log(1, call("all_to_all", sizes=(3,)))) is None


def test_a_rank_that_raises_is_named_and_what_it_did_not_reach_is_not() -> None:
    raised = log(
        2, call(), ended=Ended.RAISED, error="ValueError: no", stood=(Frame("train.py", 9, "f", True),)
    )
    message = described(log(0, call(), call()), raised, log(3, call(), call()))
    assert message == (
        "rank 2 raises (ValueError: no) at train.py:9 where rank 0 continues: real ranks would wait for it"
    )


def test_a_refusal_of_the_simulation_is_not_said_to_hang() -> None:
    refused = log(0, call(), ended=Ended.REFUSED, error="NotSimulatedError: x is not simulated: y")
    message = described(refused, log(3, call(), call()))
    assert message == (
        "rank 0 meets what is not simulated (NotSimulatedError: x is not simulated: y) "
        "where rank 3 continues: it was not compared further"
    )


def test_ranks_that_all_raise_do_not_differ() -> None:
    assert (
        described(*(log(rank, call(), ended=Ended.RAISED, error="ValueError: no") for rank in (0, 1))) is None
    )


def test_a_difference_before_the_error_comes_first() -> None:
    message = described(log(0, call(), call()), log(1, call("barrier"), ended=Ended.RAISED))
    assert message is not None
    assert message.startswith("rank 1 calls barrier")


def test_inside_of_join_a_rank_may_have_fewer() -> None:
    inside = call(phase=1)
    few = log(0, inside, call("barrier", phase=2), phase=2)
    many = log(1, inside, inside, inside, call("barrier", phase=2), phase=2)
    assert described(few, many) is None
    outside = log(0, inside, call("broadcast", phase=2), phase=2)
    assert described(outside, many) is not None


def test_a_log_that_was_cut_short_is_compared_as_far_as_it_goes() -> None:
    assert described(log(0, call(), call()), log(1, call(), ended=Ended.TOO_MANY)) is None


def test_a_log_comes_back_from_its_file(tmp_path: Path) -> None:
    sparse = Group(tuple(range(1, 4096, 8)), 1, "host", "mesh_dp")
    written = log(
        3, call(group=sparse), call("barrier", sizes=(), root=2), call(sizes=None), phase=2, error="no"
    )
    written.write(tmp_path)
    assert RankLog.read(tmp_path) == written
    assert (tmp_path / "collectives.pickle").stat().st_size < 2000


def test_the_record_has_both_stacks() -> None:
    difference = first_difference([log(0, call(line=3)), log(1, call("barrier", line=4))])
    assert difference is not None
    record = to_dict(difference)
    assert {record["stack"][0]["line"], record["other_stack"][0]["line"]} == {3, 4}


def test_ranks_are_spread_over_the_world() -> None:
    assert spread_ranks(8, None) == (0, 1, 4, 7)
    assert spread_ranks(2, None) == (0, 1)
    assert spread_ranks(64, 2) == (0, 63)
    assert spread_ranks(5, 5) == (0, 1, 2, 3, 4)
    for world, count in ((8, 1), (8, 9), (1, None), (1, 1)):
        with pytest.raises(UsageError, match="--check-ranks"):
            spread_ranks(world, count)
