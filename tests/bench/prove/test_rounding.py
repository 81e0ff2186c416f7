"""Deep transformers in bfloat16, drawn at random, whose products round otherwise if sharded: right
ones are never called wrong, and of those with a fault none is called right."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.answers.prove.parts import Request, prove
from fsdpbench.answers.prove.verdict import Part, PartVerdict, Verdict
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch import fork_server

PROGRAM = Path(__file__).parent / "deep_bfloat16.py"
CHAOTIC = 1
"""A seed whose rounding errors grow to a tenth of the gradient and more."""
FAULTS = ("own", "sum", "dropped")


def gradients_of(*arguments: str) -> PartVerdict:
    """Compare the gradients of a program on two real ranks."""
    fork_server.start("cpu")
    config = script_config({"script": PROGRAM, "gpus": "4", "script_arguments": arguments}, ())
    assert config is not None
    (found,) = prove(Request(config, frozenset({Part.GRADIENTS}), (2,))).parts
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 25))
def test_a_right_program_is_never_called_wrong(seed: int) -> None:
    found = gradients_of(str(seed), "rounds")
    assert found.verdict is not Verdict.FINDING, found
    if seed == CHAOTIC:
        assert "rounding changes" in found.summary
        assert "try float32" in found.summary


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_not_called_right(fault: str, seed: int) -> None:
    found = gradients_of(str(seed), fault, "rounds")
    assert found.verdict is not Verdict.OK, found


@pytest.mark.campaign
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_some_program(fault: str) -> None:
    verdicts = (gradients_of(str(seed), fault, "rounds").verdict for seed in range(1, 13))
    assert Verdict.FINDING in verdicts
