"""A rank that is killed or hangs: right status, cause named, nothing else lost, no process left."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

TWO = ("--system", "torch-ddp", "--batch", "8,2", "--seq", "64")


@pytest.mark.campaign
def test_a_killed_rank_is_a_crash_the_sweep_goes_on_and_a_retry_runs_it_alone(
    fsdpbench: Any, sweep: Any, tiny: tuple[str, ...]
) -> None:
    with sweep.start(*tiny, *TWO) as process:
        sweep.wait_for(lambda: len(sweep.ranks()) == 2, "no ranks started")
        os.kill(sweep.ranks()[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=250)
    sweep.wait_until_gone()
    assert process.returncode == 4, stderr
    killed, other = sorted(sweep.results.values(), key=lambda result: result["status"] == "ok")
    assert killed["status"] == "crash"
    assert "killed by SIGKILL" in killed["cause"]["message"]
    assert killed["cause"]["log"].endswith("stderr.log")
    assert other["status"] == "ok"
    assert sweep.leftovers == []
    (kept,) = (name for name, result in sweep.results.items() if result["status"] == "ok")
    before = (sweep.folder / kept / "result.json").stat().st_mtime_ns
    again = fsdpbench("sweep", *tiny, *TWO, "--retry-failed", "-o", str(sweep.folder))
    assert again.returncode == 0, again.stderr
    assert (sweep.folder / kept / "result.json").stat().st_mtime_ns == before
    assert all(result["status"] == "ok" for result in sweep.results.values())


@pytest.mark.campaign
def test_a_rank_that_hangs_in_a_collective_ends_at_the_timeout(sweep: Any, tiny: tuple[str, ...]) -> None:
    with sweep.start(*tiny, *TWO, "--timeout", "15") as process:
        sweep.wait_for(lambda: len(sweep.ranks()) == 2, "no ranks started")
        os.kill(sweep.ranks()[1], signal.SIGSTOP)
        _, stderr = process.communicate(timeout=250)
    sweep.wait_until_gone()
    assert process.returncode == 4, stderr
    hung, other = sorted(sweep.results.values(), key=lambda result: result["status"] == "ok")
    assert hung["status"] == "timeout"
    assert "ran past 15 s" in hung["cause"]["message"]
    assert other["status"] == "ok"
