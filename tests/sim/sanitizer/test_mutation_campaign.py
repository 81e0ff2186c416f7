"""Every wait, event, `record_stream` and hold of three FSDPs, taken out one at a time.

`pytest -n 0 -s -m campaign tests/sim/sanitizer/test_mutation_campaign.py` writes `ci/measured/mutants_*.txt`.
Each mutant is reported, or its harmlessness is argued in `harmless/`: a new place that does neither fails, and
so does an argument for a place that is reported or gone.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path

import mutant_runs
import pytest
import torch
from harmless_reasons import read_reasons
from program_matrix import KNOWN, MATRIX, OWNERS
from training_programs import run

MEASURED = Path(__file__).parents[3] / "ci" / "measured"


def in_own_process() -> None:
    """Have all that is mutated loaded, in the process that forks."""
    import torch.distributed.fsdp

    from fsdpbench.sim import preload

    torch.set_num_threads(1)
    preload()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("owner", OWNERS)
def test_every_mutant_is_reported_or_harmless(owner: str) -> None:
    in_own_process()
    start, reasons, outcomes = time.monotonic(), read_reasons(owner), []
    for outcome in mutant_runs.run_all(owner, OWNERS[owner]):
        outcomes.append(outcome)
        print(mutant_runs.told(outcome, reasons), flush=True)
    unreported = {outcome.site.key for outcome in outcomes if not outcome.is_reported and not outcome.error}
    failed = [outcome.site.key for outcome in outcomes if outcome.error]
    missed, stale = sorted(unreported - reasons.keys()), sorted(reasons.keys() - unreported)
    summary = (
        f"{len(outcomes)} mutants, {len(OWNERS[owner])} programs: {len(outcomes) - len(unreported) - len(failed)} "
        f"reported, {len(unreported) - len(missed)} harmless, {len(missed)} missed, {len(failed)} failed"
    )
    print(summary)
    head = [
        f"pytest -n 0 -s -m campaign {Path(__file__).relative_to(MEASURED.parents[1])} -k {owner}",
        summary,
        f"Python {platform.python_version()}, torch {torch.__version__}; {time.monotonic() - start:.0f} s",
        "",
    ]
    lines = [mutant_runs.told(outcome, reasons) for outcome in outcomes]
    (MEASURED / f"mutants_{owner}.txt").write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    assert not missed, "neither reported nor argued harmless:\n" + "\n".join(missed)
    assert not failed, "mutants that raise instead of racing:\n" + "\n".join(failed)
    assert not stale, "argued harmless, but reported or gone:\n" + "\n".join(stale)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("system", MATRIX)
def test_nothing_is_reported_without_a_mutation(system: str) -> None:
    in_own_process()

    def whole_matrix() -> list[str]:
        found = []
        for case in MATRIX[system]:
            told = run(case)
            assert told["accesses"] > 100, case.name
            found += [f"{case.name}: {finding}" for finding in told["findings"]]
        return found

    found = mutant_runs.in_fork(whole_matrix)
    print(f"{system}: {len(MATRIX[system])} programs, {len(found)} findings")
    assert not found, "\n".join(found)


@pytest.mark.campaign
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_torch_is_found(name: str) -> None:
    in_own_process()
    for case in KNOWN[name]:
        assert mutant_runs.in_fork(lambda case=case: run(case))["findings"], case.name
