"""Ranks that a signal kills: the pool warns and runs the case again on fresh ranks; twice is a failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def case_crash(rank: int, *, times: int, marks: str) -> int:
    """Let rank 1 die, the first ``times`` calls, while rank 0 waits for it in a collective."""
    if rank == 1:
        before = len(list(Path(marks).iterdir()))
        if before < times:
            (Path(marks) / str(before)).touch()
            os.kill(os.getpid(), signal.SIGSEGV)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def test_crash_once(two_ranks, tmp_path) -> None:
    with pytest.warns(
        UserWarning, match="case_crash ran again on fresh ranks: (?s:.*)rank 1:\nkilled by SIGSEGV"
    ):
        assert two_ranks.run(case_crash, times=1, marks=str(tmp_path)) == 2


def test_crash_twice(two_ranks, tmp_path) -> None:
    with (
        pytest.warns(UserWarning, match="ran again"),
        pytest.raises(AssertionError, match="rank 1:\nkilled by SIGSEGV"),
    ):
        two_ranks.run(case_crash, times=2, marks=str(tmp_path))
    assert two_ranks.run(case_crash, times=0, marks=str(tmp_path)) == 2
