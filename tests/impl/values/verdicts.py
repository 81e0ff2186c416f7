"""What became of a program: equal to the plain model, an error that names a unit, or wrong values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from values.wraps import Wrap, differences, whole

EQUAL, BOTH_RAISE, NAMED, TOLD = "equal", "both raise", "error that names the unit", "error, unit in the log"
UNNAMED, PASSES, WRONG = "error without a unit", "runs where plain raises", "WRONG"
UNSEEN = "write through .data"


@dataclass
class Told:
    """The warnings of FSDP while a program runs."""

    lines: list[str] = field(default_factory=list)


@contextmanager
def listening() -> Iterator[Told]:
    told, logger = Told(), logging.getLogger("fsdpbench.impl")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.lines.append(record.getMessage())

    handler, before = Handler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield told
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


Program = Callable[[nn.Module], Iterator[dict[str, Any]]]
"""Runs a model, and yields what is seen now and then."""


@dataclass
class Course:
    """What one model showed: values by step, and the exception that ended it."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None


def course_of(model: nn.Module, program: Program, looks: bool) -> Course:
    course, held = Course(), dict(model.named_parameters())
    torch.manual_seed(3)
    try:
        for seen in program(model):
            values = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in seen.items()}
            course.seen.append({**values, **(whole(model, held) if looks else {})})
        if not looks:
            course.seen.append(whole(model, held))
    except Exception as error:
        course.error = error
    return course


def judge(plain: Course, ours: Course, told: Told) -> tuple[str, str]:
    """The verdict, and its words."""
    for number, (mine, theirs) in enumerate(zip(ours.seen, plain.seen, strict=False)):
        found = differences(mine, theirs)
        if found:
            said = [line for line in told.lines if "unit '" in line]
            return (TOLD, said[0][:150]) if said else (WRONG, f"step {number}: {', '.join(found[:3])}")
    if ours.error is None:
        return (EQUAL, "") if plain.error is None else (PASSES, str(plain.error)[:150])
    words = f"{type(ours.error).__name__}: {ours.error}"[:150]
    if plain.error is not None and len(ours.seen) >= len(plain.seen):
        return BOTH_RAISE, words
    if "unit '" in str(ours.error) or "embers of one" in str(ours.error):
        return NAMED, words
    return (TOLD, words) if any("unit '" in line for line in told.lines) else (UNNAMED, words)


def compare(
    make: Callable[[], nn.Module],
    units: Any,
    program: Program,
    wrap: Wrap,
    *,
    looks: bool = True,
    theirs: Course | None = None,
) -> tuple[str, str]:
    """Run ``program`` on the plain model and on the wrapped one.

    Args:
        looks: whether all parameters and gradients are looked at after each step, not at the end alone.
        theirs: the plain model's course, where it is known.
    """
    theirs = theirs or plain_course(make, program, looks)
    torch.manual_seed(1)
    model = make()
    with listening() as told:
        ours = course_of(wrap(model, units(model)), program, looks)
    return judge(theirs, ours, told)


def plain_course(make: Callable[[], nn.Module], program: Program, looks: bool) -> Course:
    torch.manual_seed(1)
    return course_of(make(), program, looks)


def under(mutant: Callable[[], Any], program: Program) -> Program:
    """``program``, where FSDP is a mutant while the model runs; not while it is looked at."""

    def mutated(model: nn.Module) -> Iterator[dict[str, Any]]:
        steps = program(model)
        while True:
            with mutant():
                seen = next(steps, None)
            if seen is None:
                return
            yield seen

    return mutated
