"""Ctrl-C and SIGTERM: what is finished is kept, nothing stays, the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.request import target_of
from fsdpbench.launch.point import run_point
from fsdpbench.sweep.planning import make_config

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


def test_a_command_that_keeps_nothing_does_not_say_that_it_does(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fsdpbench", "watch", str(tmp_path / "none"), "--wait", "60"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "waiting for a sweep" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "fsdpbench: interrupted"


def test_a_configuration_whose_folder_is_gone_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An interruption removes the folder of what it had just started."""
    child = os.fork()
    if child == 0:
        try:
            run_point(_any_configuration(), str(tmp_path / "gone"))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert capfd.readouterr().err == ""


def _any_configuration() -> dict[str, Any]:
    chosen, _ = target_of({"model": "gpt-tiny", "gpus": 2, "device": "sim"})
    return make_config(chosen, "torch-ddp", Settings.of(), chosen.workload()).to_dict()
