"""Deep transformers in bfloat16, drawn at random, whose products round otherwise if sharded: right
ones are never called wrong, and of those with a fault none is called right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fsdpbench.answers.prove.parts import Request, prove
from fsdpbench.answers.prove.verdict import Part, PartVerdict, Verdict
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch import fork_server

PROGRAM = Path(__file__).parent / "deep_bfloat16.py"
CHAOTIC = 1
"""A seed whose rounding errors grow to a tenth of the gradient and more."""


def gradients_of(*arguments: str) -> PartVerdict:
    """Compare the gradients of a program on two real ranks."""
    fork_server.start("cpu")
    config = script_config({"script": PROGRAM, "gpus": "4", "script_arguments": arguments}, ())
    assert config is not None
    (found,) = prove(Request(config, frozenset({Part.GRADIENTS}), (2,))).parts
    return found


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_a_right_program_is_never_called_wrong() -> None:
    verdicts = {seed: gradients_of(str(seed), "rounds") for seed in range(1, 25)}
    print(Counter(each.verdict.value for each in verdicts.values()))
    assert not {seed: each for seed, each in verdicts.items() if each.verdict is Verdict.FINDING}
    assert "rounding changes" in verdicts[CHAOTIC].summary
    assert "try float32" in verdicts[CHAOTIC].summary


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", ["own", "sum", "dropped"])
def test_a_fault_is_found_or_not_judged(fault: str) -> None:
    verdicts = {seed: gradients_of(str(seed), fault, "rounds") for seed in range(1, 13)}
    print(fault, Counter(each.verdict.value for each in verdicts.values()))
    assert not {seed: each for seed, each in verdicts.items() if each.verdict is Verdict.OK}
    assert any(each.verdict is Verdict.FINDING for each in verdicts.values())
