"""What the terminal says of ranks that were compared."""

from __future__ import annotations

from typing import Any

from fsdpbench.cli.terminal.notes import script_notes
from fsdpbench.reports.result import Result

FRAME = {"file": "/home/me/train.py", "line": 31, "function": "main", "own": True}


def result(difference: dict[str, Any] | None, ended: str = "ok", cause: str | None = None) -> Result:
    collectives = {"calls": {"0": 12, "7": 12}, "ended": {"0": ended, "7": ended}}
    check = {"ranks": [0, 7], "collectives": collectives, "difference": difference}
    return Result.of(
        {
            "status": "ok",
            "rank_check": check,
            "config": {"gpus": 8},
            "cause": None if cause is None else {"message": cause},
        }
    )


def test_ranks_that_agree_are_one_line() -> None:
    rest = "; the other 6 were not run (--check-ranks 8 runs all)"
    assert script_notes(result(None)) == [f"ranks 0, 7 call the same 12 collectives{rest}"]
    (line,) = script_notes(result(None, "raised", "rank 0: ValueError"))
    assert line.endswith(f"and fail in the same way{rest}")


def test_a_difference_has_both_stacks_and_is_not_said_twice() -> None:
    difference = {
        "message": "rank 7 never joins", "rank": 7, "other_rank": 0, "stack": [], "other_stack": [FRAME],
    }  # fmt: skip
    stack = ["  rank 0, your lines first, innermost first:", "    /home/me/train.py:31 in main"]
    assert script_notes(result(difference, cause="rank 7 never joins")) == stack
    assert script_notes(result(difference, cause="rank 0: out of memory")) == ["rank 7 never joins", *stack]
