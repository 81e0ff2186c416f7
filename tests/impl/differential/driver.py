"""Runs programs on a pool of ranks: what they found, hangs and crashes included.

A hang or a crash is torch's own if torch alone ends so as well, in no later operation, and ours alone comes
to its end: a process may die of what the other side did to it before, or another rank. Where both, each
alone, end so in the same operation, that is as an exception that both raise.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from differential.explanations.explained import TORCH_CRASHES, TORCH_HANGS
from differential.ranks.in_ranks import run_program
from differential.ranks.lockstep import Difference, Result
from differential.ranks.trail import last_steps
from differential.ranks.wrapping import SIDES
from differential.specs import Program
from rank_pool import RankPool

SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
"""A program that takes longer hangs; more of them where the machine is busy with other things."""


@dataclass
class Ending:
    """How a program ended on all ranks."""

    how: str = ""
    """``hang``, ``crash`` or ``harness``; "" if every rank answered."""
    words: str = ""
    last: list[str] = field(default_factory=list)
    """What each rank did last: one may end for what another has not done."""
    results: list[Result] = field(default_factory=list)

    def operation(self) -> int:
        """The number of the last operation that a rank began, -1 if none did."""
        return max((int(step.split()[1]) for step in self.last if step), default=-1)


def run(pool: RankPool, program: Program, seconds: float = SECONDS) -> Result:
    """All ranks' findings as one; a hang or a crash is a difference of its own, unless it is torch's."""
    ending = run_sides(pool, program, seconds, SIDES)
    if not ending.how:
        return _merged(ending.results)
    theirs, ours = (run_sides(pool, program, seconds, (side,)) for side in SIDES)
    if theirs.how == ending.how and not ours.how and theirs.operation() <= ending.operation():
        torchs = TORCH_CRASHES if ending.how == "crash" else TORCH_HANGS
        return Result(explained=[torchs.name])
    if theirs.how == ours.how == ending.how and theirs.operation() == ours.operation() >= 0:
        return Result(errors=[f"{ending.how} of each alone"])
    words = [f"last: {ending.last}", ending.words[-2500:]]
    words += [f"torch alone: {theirs.how or 'ends'}", f"impl alone: {ours.how or 'ends'}"]
    return Result(differences=[Difference(-2, ending.how, "", "\n".join(words))])


def run_sides(pool: RankPool, program: Program, seconds: float, sides: Sequence[str]) -> Ending:
    """Run the program on these sides; the pool starts anew after a hang or a crash."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        trail = Path(directory) / "trail"
        trail.touch()
        try:
            results = pool.run_everywhere(
                run_program, timeout=seconds, program=program, sides=tuple(sides), trail=str(trail)
            )
        except AssertionError as error:
            how = _how(str(error))
            return Ending(how, str(error), last_steps(trail, program.ranks))
    return Ending(results=results)


def _how(words: str) -> str:
    """What a pool's error says happened."""
    if re.search(r"rank \d+:\n(the process ended|killed by)", words):
        return "crash"
    waited = r"ranks \[[\d, ]+\] did not answer|Timed out waiting|Application timeout"
    return "hang" if re.search(waited, words) else "harness"


def _merged(results: list[Result]) -> Result:
    merged = results[0]
    if not merged.differences:
        merged.differences = next((each.differences for each in results if each.differences), [])
    merged.explained = sorted({name for each in results for name in each.explained})
    return merged
