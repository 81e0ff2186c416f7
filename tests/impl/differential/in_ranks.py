"""What the rank pool calls: loaded by path in each rank."""

from __future__ import annotations

from typing import Any

from differential.lockstep import Result, compare
from differential.specs import Program


def run_program(rank: int, *, program: Program) -> Any:
    result: Result = compare(rank, program)
    return result
