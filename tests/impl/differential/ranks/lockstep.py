"""One program on both sides, operation by operation, until they differ. Runs inside the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from differential import operations as ops
from differential.around import CallInside
from differential.explanations.explained import explanation_of
from differential.explanations.situation import Situation, leaves_unreduced, views_comparable
from differential.ranks import around, misuse, saving, training  # noqa: F401 (they register their operations)
from differential.ranks.interpreter import Run, carry_out, whole_parameters
from differential.ranks.naming import names_seen
from differential.ranks.observing import Seen, Tolerance, differences, looked_at, tolerance_for
from differential.ranks.trail import Trail
from differential.ranks.wrapping import SIDES
from differential.specs import Flat, Program

TRAINING = ops.Forward | ops.Backward | CallInside


@dataclass(frozen=True)
class Difference:
    """Where the sides part: -1 is wrapping, the number of operations the look at whole parameters."""

    index: int
    name: str
    torch: str
    impl: str

    def __str__(self) -> str:
        return f"operation {self.index}: {self.name}\n  torch: {self.torch}\n  impl:  {self.impl}"


@dataclass
class Result:
    """What one rank found."""

    operations: int = 0
    differences: list[Difference] = field(default_factory=list)
    """Unexplained, all of the first operation that has any."""
    explained: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """The types of exceptions that both raised."""
    log: Any = None


def tolerance_of(program: Program) -> Tolerance:
    """Summands: the elements of a row and of a batch, for as many steps as there are operations."""
    dtypes = {program.model.dtype, "float32", *filter(None, program.wrap.precision)}
    dtypes |= {block.extra for block in program.model.blocks if block.extra}
    low = any(torch.finfo(getattr(torch, name)).bits == 16 for name in dtypes)
    return tolerance_for(dtypes, 8 if low else 64)


def compare(
    rank: int, program: Program, log: Any = None, sides: Sequence[str] = SIDES, trail: str = ""
) -> Result:
    """Run the program on both sides, or on one of them alone, where nothing is compared.

    Args:
        log: is given lines about what each shows.
        trail: a file that says where this rank is, see ``trail.py``.
    """
    result, tolerance = Result(log=log), tolerance_of(program)
    runs = [Run(side, rank, program) for side in sides]
    for run in runs:
        run.other, run.first = runs[1 - runs.index(run)] if len(runs) > 1 else run, run is runs[0]
        run.trail = Trail(trail, rank)
    with ExitStack() as stack:
        for run in runs:
            stack.callback(run.trail.close)
            stack.enter_context(run.cleanups)
        for index, operation in enumerate((None, *program.operations), start=-1):
            ended = _one(result, runs, program, index, operation, tolerance)
            result.operations += 1
            if _anywhere(bool(result.differences) or ended):
                return result
        _final(result, runs, program, len(program.operations), tolerance)
        _anywhere(False)
    return result


def _one(
    result: Result, runs: list[Run], program: Program, index: int, operation: Any, tolerance: Tolerance
) -> bool:
    """Carry out one operation on both sides; whether the program ends here."""
    outcomes = []
    for run in runs:
        run.trail.enter(run.side, index, type(operation).__name__)
        outcomes.append(carry_out(run, operation))
    if result.log:
        result.log(f"operation {index}: {operation}")
        for run, (seen, words) in zip(runs, outcomes, strict=True):
            result.log(f"  {run.side}: {seen} {words:.300}")
    ended = _compare(result, program, index, operation, [seen for seen, _ in outcomes], tolerance, outcomes)
    error = outcomes[0][0]["error"]
    if error:
        result.errors.append(error)
    if (
        ended
        or outcomes[0][0]["error"] != outcomes[-1][0]["error"]
        or (error and ends_program(program, index))
    ):
        return True
    if error and isinstance(operation, TRAINING):
        return False  # in between the state is not defined
    looks = [_look(run, index, looked_at_all) for run in runs]
    if not views_comparable(program):
        looks = [{k: v for k, v in seen.items() if not k.startswith(("parameter", "grad"))} for seen in looks]
        if not any(run.losses for run in runs) and not leaves_unreduced(program, index):
            wholes = [_look(run, index, whole_parameters) for run in runs]
            looks = [{**seen, **whole} for seen, whole in zip(looks, wholes, strict=True)]
    return _compare(result, program, index, operation, looks, tolerance, None)


def looked_at_all(run: Run) -> Seen:
    """Values and names."""
    return {**looked_at(run.model), **names_seen(run.model, in_flight=bool(run.losses))}


def _look(run: Run, index: int, look: Callable[[Run], Seen]) -> Seen:
    run.trail.enter(run.side, index, "look")
    return look(run)


def operation_at(program: Program, index: int) -> ops.Operation | None:
    return program.operations[index] if 0 <= index < len(program.operations) else None


def ends_program(program: Program, index: int) -> bool:
    """After an exception in these torch's own state is not defined.

    A model that could not be wrapped is none, FSDP1 has no way back, FSDP2 has ``reset_iter_state``.
    """
    operation = operation_at(program, index)
    if isinstance(operation, TRAINING):
        return isinstance(program.wrap, Flat) or operation_at(program, index + 1) != ops.ResetIterState()
    return operation is None or isinstance(operation, ops.RemakeGroups)


def _final(result: Result, runs: list[Run], program: Program, index: int, tolerance: Tolerance) -> None:
    if any(run.losses for run in runs):
        return  # between forward and backward torch refuses, or shows what is in flight
    if leaves_unreduced(program, index):
        return
    looks = [_look(run, index, whole_parameters) for run in runs]
    _compare(result, program, index, None, looks, tolerance, None)


def _compare(
    result: Result,
    program: Program,
    index: int,
    operation: Any,
    seen: list[Seen],
    tolerance: Tolerance,
    outcomes: Any,
) -> bool:
    if len(seen) == 1:
        return False
    theirs, ours = seen
    ended = False
    for name, our, their in differences(ours, theirs, tolerance):
        words = [f" ({text[:300]})" if text else "" for _, text in outcomes] if outcomes else ["", ""]
        situation = Situation(program, index, operation, name, their, our, words[0], words[1])
        explained = explanation_of(situation)
        if explained is not None:
            result.explained.append(explained.name)
            ended |= explained.ends
            if name == "error":
                break  # what one of them shows besides has no counterpart
        else:
            found = Difference(index, name, f"{their!s:.500}{words[0]}", f"{our!s:.500}{words[1]}")
            result.differences.append(found)
    return ended


def _anywhere(ends: bool) -> bool:
    """Whether any rank ends: all of them stop at one operation, so that no collective is left alone."""
    flag = torch.tensor([float(ends)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
