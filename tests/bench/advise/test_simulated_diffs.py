"""A diff is simulated: the script that it makes has the figures that its advice says."""

from __future__ import annotations

import pytest

from .conftest import Run
from .trained import script

SCRIPTS = {
    "fsdp2": {"keep", "prefetch", "wrap-pairs", "double-batch", "compile"},
    "fsdp1": {"keep", "prefetch", "double-batch", "compile"},
    "checkpoint": {"no-checkpoint"},
    "fp32": {"bf16"},
    "offload": {"no-offload"},
    "one_unit": {"wrap-blocks"},
    "one_unit_fsdp1": {"wrap-blocks"},
    "root": {"wrap-root"},
    "foreach": {"fused"},
    "no_prefetch_fsdp1": {"backward-prefetch", "prefetch"},
    "zeros": {"none-grads"},
    "no_limit_fsdp1": {"limit"},
    "halves": {"wrap-blocks"},
    "synchronize": {"no-waits"},
    "item": {"no-waits"},
    "clip_item": {"no-waits"},
    "pageable": {"no-waits"},
    "nodes fsdp2": {"hybrid"},
    "nodes fsdp1": {"hybrid"},
}
"""Scripts with one mistake, and the variations that are compared with their diffs there."""


@pytest.mark.campaign
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_patched_script_has_the_figures_of_its_variation(name: str, run: Run) -> None:
    files, gpus = {"train.py": script(name.removeprefix("nodes "))}, 16 if name.startswith("nodes ") else 8
    tried = run(files, gpus=gpus)
    compared = set()
    for candidate in tried.candidates:
        if candidate.variation not in SCRIPTS[name] - compared:
            continue
        diff = tried.diff(candidate)
        assert diff is not None, candidate
        varied, patched = run(files, candidate.variation, gpus=gpus), run(files, diff=diff, gpus=gpus)
        assert patched.figures == pytest.approx(varied.figures, rel=2e-3), diff
        compared.add(candidate.variation)
    assert compared == SCRIPTS[name]
