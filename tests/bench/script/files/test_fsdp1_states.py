"""FSDP1's optimizer states on simulated ranks, beside those of real gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

RANKS = 3
PROGRAM = Path(__file__).with_name("fsdp1_states.py")


@pytest.mark.campaign
def test_states_are_those_of_real_ranks(run_script: RunScript, tmp_path: Path) -> None:
    """Names, types, sizes, groups: whole and sharded, by context, by the older calls, by checkpoints."""
    words = [sys.executable, str(PROGRAM), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*words, str(rank), str(RANKS)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for rank in range(RANKS)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS
    run = run_script(PROGRAM, gpus=RANKS, to_the_end=True)
    assert run.result["status"] == "ok", run.cause
    expected, found = json.loads(outputs[0]), json.loads(run.output)
    assert expected.keys() == found.keys()
    assert len(expected) == 24
    assert {name: found[name] for name in found if found[name] != expected[name]} == {}
