"""Ctrl-C and SIGTERM: what is finished is kept, nothing stays, the same command goes on."""

from __future__ import annotations

import signal
from typing import Any

import pytest

SPACE = ("--system", "torch-ddp", "--batch", "1,8", "--seq", "64")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.campaign)],
)
def test_an_interruption_loses_what_is_in_flight_alone(
    fsdpbench: Any, sweep: Any, tiny: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    with sweep.start(*tiny, *SPACE) as process:
        sweep.wait_for(lambda: sweep.results and sweep.ranks(), "nothing finished")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    sweep.wait_until_gone()
    assert process.returncode == code, stderr
    assert "start the same command again" in stderr
    assert "Traceback" not in stderr
    assert sweep.leftovers == []
    kept = set(sweep.results)
    assert len(kept) == 1
    done = fsdpbench("sweep", *tiny, *SPACE, "-o", str(sweep.folder))
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of 2 configurations are done already" in done.stderr
    assert kept < set(sweep.results)
