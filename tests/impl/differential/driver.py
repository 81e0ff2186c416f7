"""Runs programs on a pool of ranks: what they found, hangs and crashes included."""

from __future__ import annotations

import os

from differential.in_ranks import run_program
from differential.lockstep import Difference, Result
from differential.specs import Program
from rank_pool import RankPool

SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
"""A program that takes longer hangs; more of them where the machine is busy with other things."""


def run(pool: RankPool, program: Program, seconds: float = SECONDS) -> Result:
    """All ranks' findings as one; a hang or a crash is a difference of its own, and the pool starts anew."""
    try:
        results: list[Result] = pool.run_everywhere(run_program, timeout=seconds, program=program)
    except AssertionError as error:
        kind = (
            "hang or crash" if "did not answer" in str(error) or "process ended" in str(error) else "harness"
        )
        return Result(differences=[Difference(-2, kind, "", str(error)[-3000:])])
    merged = results[0]
    if not merged.differences:
        merged.differences = next((each.differences for each in results if each.differences), [])
    merged.explained = sorted({name for each in results for name in each.explained})
    return merged
