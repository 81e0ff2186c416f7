"""Programs of ``fixed_programs.txt`` on torch's FSDP and on ours: those that found something once, and some
that were drawn. They are kept as text, so that no version of hypothesis changes them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from differential import around, operations, specs
from differential.driver import run
from differential.operations import Backward, Forward, Step, ZeroGrad
from differential.ranks.lockstep import Result
from differential.ranks.observing import Tolerance, differences, tolerance_for, value_of
from differential.ranks.trail import Trail
from differential.shrinking import shrink
from differential.specs import BlockSpec, ModelSpec, Program
from rank_pool import RankPool

NAMES = {**vars(specs), **vars(operations), **vars(around)}
LINES = Path(__file__).with_name("fixed_programs.txt").read_text().splitlines()
PROGRAMS = [eval(line, NAMES) for line in LINES if line.startswith("Program")]


@pytest.mark.parametrize("kind", ["Flat", "Sharded"])
def test_no_difference(two_ranks, kind: str) -> None:
    chosen = [program for program in PROGRAMS if type(program.wrap).__name__ == kind]
    assert len(chosen) >= 10
    failed: list[str] = []
    for program in chosen:
        result = run(two_ranks, program, seconds=60)
        failed += [f"{program!r}\n{difference}" for difference in result.differences[:2]]
    assert not failed, "\n".join(failed)


def test_programs_print_as_python() -> None:
    for program in PROGRAMS:
        assert eval(repr(program), NAMES) == program


def test_what_differs_is_seen() -> None:
    one = {"a": value_of(torch.ones(3)), "b": None, "c": 1.0, "error": ""}
    strict = Tolerance(1e-6)
    assert not list(differences(one, dict(one), strict))
    changes = {
        "a": [
            value_of(torch.ones(3) * 1.001),
            value_of(torch.ones(3, 1)),
            value_of(torch.ones(3).double()),
            None,
        ],
        "b": [value_of(torch.zeros(1))],
        "c": [1.1, float("nan")],
        "error": ["ValueError"],
    }
    for name, values in changes.items():
        for value in values:
            assert [each[0] for each in differences({**one, name: value}, one, strict)] == [name]
    assert [each[0] for each in differences({k: v for k, v in one.items() if k != "c"}, one, strict)] == ["c"]
    assert [each[0] for each in differences({**one, "more": 1}, one, strict)] == ["more"]
    assert tolerance_for({"float32", "bfloat16"}, 8).relative > tolerance_for({"float32"}, 8).relative


def dying_program(
    rank: int, *, program: Program, sides: Sequence[str], trail: str, dies: Sequence[str]
) -> Result:
    """In place of ``run_program``: rank 1 ends by a signal when it is on one of the sides ``dies``."""
    for side in sides:
        Trail(trail, rank).enter(side, 3, "Backward")
        if rank == 1 and side in dies:
            os.kill(os.getpid(), signal.SIGKILL)
    return Result()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("dies", "explained", "differences", "errors"),
    [
        (("torch",), ["torch crashes"], 0, []),
        (("impl",), [], 1, []),
        (("torch", "impl"), [], 0, ["crash of each alone"]),
    ],
)
def test_a_crash_is_of_one_side(
    monkeypatch, dies: tuple[str, ...], explained: list[str], differences: int, errors: list[str]
) -> None:
    pool = RankPool(2)
    everywhere = pool.run_everywhere
    monkeypatch.setattr(
        pool, "run_everywhere", lambda _, **arguments: everywhere(dying_program, dies=dies, **arguments)
    )
    try:
        result = run(pool, Program())
    finally:
        pool.stop()
    assert (result.explained, len(result.differences), result.errors) == (explained, differences, errors)
    assert all("'impl 3 Backward']\n" in str(each) for each in result.differences), result.differences


def test_shrinking() -> None:
    """A failure that needs a step of a model with a branch shrinks to just that."""
    blocks = (BlockSpec(norm="layer"), BlockSpec(branch=True, frozen="bias"))
    program = Program(
        ModelSpec(blocks, tied=True), operations=(Forward(skip=(1,)), Backward(), Step(), ZeroGrad())
    )

    def fails(attempt: Program) -> str:
        branches = any(block.branch for block in attempt.model.blocks)
        return "step" if branches and any(isinstance(each, Step) for each in attempt.operations) else ""

    smallest = replace(program, model=ModelSpec((BlockSpec(branch=True),)), operations=(Step(),))
    assert shrink(program, fails) == smallest
