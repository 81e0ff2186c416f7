"""A campaign: programs by seeds, counted. What was done is kept, so that it can be stopped and gone on with.

Each seed stands for a fixed number of programs and has one file of counts; a failure has a script beside it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis
from differential.driver import run
from differential.explanations.explained import EXPLANATIONS
from differential.programs import programs
from differential.shrinking import shrink, signature, write_script
from differential.specs import Program
from hypothesis import HealthCheck, Phase, given, seed, settings
from rank_pool import RankPool

PROGRAMS_A_SEED = 25
ATTEMPTS = int(os.environ.get("FUZZ_SHRINK", "60"))
"""How many programs are tried to make one that failed smaller."""


def ranks_of(number: int) -> int:
    """Every fifth seed is of four ranks, every tenth of three, where no size divides evenly."""
    return 4 if number % 5 == 4 else 3 if number % 10 in (2, 7) and number % 20 < 10 else 2


def programs_of(number: int) -> list[Program]:
    """The programs of a seed, each another one."""
    drawn: dict[Program, None] = {}

    @seed(number)
    @settings(
        max_examples=2 * PROGRAMS_A_SEED, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(flat=number % 2 == 0, ranks=ranks_of(number)))
    def draw(program: Program) -> None:
        drawn[program] = None

    draw()
    return list(drawn)[:PROGRAMS_A_SEED]


def features_of(program: Program) -> set[str]:
    """What a program has, in words: everything that is not the default."""
    found = {type(program.wrap).__name__, f"{program.ranks} ranks"}
    for part, value in (
        ("wrap", program.wrap),
        ("model", program.model),
        *(("block", b) for b in program.model.blocks),
    ):
        for each in fields(value):
            if each.name not in ("blocks", "width") and getattr(value, each.name) != each.default:
                found.add(f"{part}.{each.name}")
    return found | {f"operation {type(operation).__name__}" for operation in program.operations}


def run_seed(number: int, pool: RankPool, directory: Path) -> dict[str, Any]:
    """Run the programs of a seed, unless that was done already; returns its counts."""
    kept = directory / f"seed-{number}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    features: Counter[str] = Counter()
    explained: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    failed: list[str] = []
    operations = complete = 0
    drawn = programs_of(number)
    for program in drawn:
        result = run(pool, program)
        features.update(features_of(program))
        explained.update(result.explained)
        errors.update(result.errors)
        operations += max(0, result.operations - 1)
        complete += result.operations == len(program.operations) + 1
        if result.differences:
            failed.append(signature(program, result.differences[0]))
            _write(program, pool, directory / f"difference-{number}-{len(failed)}.py")
    counts = {
        "programs": len(drawn), "operations": operations, "complete": complete, "failed": failed,
        "features": features, "explained": explained, "errors": errors,
    }  # fmt: skip
    kept.write_text(json.dumps(counts))
    return counts


def _write(program: Program, pool: RankPool, path: Path) -> None:
    def fails(attempt: Program) -> str:
        result = run(pool, attempt)
        return signature(attempt, result.differences[0]) if result.differences else ""

    first = run(pool, program)
    if first.differences and first.differences[0].index >= -1:  # a hang takes too long to try again and again
        program = shrink(program, fails, most=ATTEMPTS)
    if first.differences:
        write_script(program, first.differences[0], path)
    else:
        path.write_text(f'"""Failed once, and not again."""\n\nPROGRAM = """{program!r}"""\n')


def report(counts: Iterable[dict[str, Any]]) -> str:
    """The counts of all seeds as text."""
    totals: dict[str, Counter[str]] = {
        name: Counter() for name in ("features", "explained", "errors", "failed")
    }
    numbers: Counter[str] = Counter()
    for each in counts:
        for name, total in totals.items():
            total.update(each[name])
        numbers.update({name: each[name] for name in ("programs", "operations", "complete")})
    lines = [
        f"{numbers['programs']} programs, {numbers['operations']} operations "
        f"(hypothesis {hypothesis.__version__}); {numbers['complete']} programs came to their end, "
        "the others ended with an exception of both sides or an explained difference",
        f"unexplained differences: {totals['failed'].total()}",
        *(f"  {count:5} {what}" for what, count in totals["failed"].most_common()),
        "explained differences, by programs:",
    ]
    lines += (
        f"  {totals['explained'][each.name]:5} {each.name}: {each.reason} ({each.document})"
        for each in EXPLANATIONS
    )
    for title, name in (
        ("exceptions that both raised", "errors"),
        ("programs by what is in them", "features"),
    ):
        listed = ", ".join(f"{what} {count}" for what, count in totals[name].most_common())
        lines.append(f"{title}: {listed}")
    return "\n".join(lines) + "\n"
