"""Every wait, event, `record_stream` and hold of three FSDPs, taken out one at a time.

`pytest -n 0 -s -m campaign tests/sim/sanitizer/test_mutation_campaign.py` writes `ci/measured/mutants_*.txt`.
Each mutant is reported, or its harmlessness is argued in `harmless/`: a new place that does neither fails,
and so does an argument for a place that is reported or gone.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from pathlib import Path
from typing import Any

import mutant_runs
import pytest
import torch
from harmless_reasons import read_reasons
from program_matrix import MATRIX, OWNERS
from trained_models import run

MEASURED = Path(__file__).parents[3] / "ci" / "measured"
CAMPAIGN = Path(__file__).relative_to(MEASURED.parents[1])


def all_mutants(owner: str, reasons: dict[str, str]) -> list[dict[str, Any]]:
    mutant_runs.prepare()
    found = []
    for outcome in mutant_runs.run_all(owner, OWNERS[owner]):
        print(mutant_runs.told(outcome, reasons), flush=True)
        found.append(dataclasses.asdict(outcome) | {"line": mutant_runs.told(outcome, reasons)})
        found[-1]["key"] = outcome.site.key
    return found


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("owner", OWNERS)
def test_every_mutant_is_reported_or_harmless(owner: str) -> None:
    start, reasons = time.monotonic(), read_reasons(owner)
    outcomes = mutant_runs.in_fork(lambda: all_mutants(owner, reasons), limit_s=7000.0)
    failed = [each["key"] for each in outcomes if each["error"]]
    unreported = {each["key"] for each in outcomes if not each["kinds"] and not each["error"]}
    missed, stale = sorted(unreported - reasons.keys()), sorted(reasons.keys() - unreported)
    reached = sum(each["programs"] > 0 for each in outcomes)
    summary = (
        f"{len(outcomes)} mutants, {reached} of them reached by {len(OWNERS[owner])} programs: "
        f"{len(outcomes) - len(unreported) - len(failed)} reported, {len(unreported) - len(missed)} argued "
        f"harmless, {len(missed)} missed, {len(failed)} failed"
    )
    print(summary)
    head = [
        f"pytest -n 0 -s -m campaign {CAMPAIGN} -k '{owner} and mutant'",
        summary,
        f"Python {platform.python_version()}, torch {torch.__version__}; {time.monotonic() - start:.0f} s",
        "Each place: what was taken out, and what the first program that was reported met (kind and count).",
        "",
    ]
    lines = [each["line"] for each in outcomes]
    (MEASURED / f"mutants_{owner}.txt").write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    assert not missed, "neither reported nor argued harmless:\n" + "\n".join(missed)
    assert not failed, "mutants that raise instead of racing:\n" + "\n".join(failed)
    assert not stale, "argued harmless, but reported or gone:\n" + "\n".join(stale)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("system", MATRIX)
def test_nothing_is_reported_without_a_mutation(system: str) -> None:
    def whole_matrix() -> list[str]:
        mutant_runs.prepare()
        found = []
        for case in MATRIX[system]:
            told = run(case)
            assert told["accesses"] > 100, case.name
            found += [f"{case.name}: {finding}" for finding in told["findings"]]
        return found

    found = mutant_runs.in_fork(whole_matrix, limit_s=1100.0)
    print(f"{system}: {len(MATRIX[system])} programs, {len(found)} findings")
    assert not found, "\n".join(found)
