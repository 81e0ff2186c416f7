"""What is recommended: the best of torch's FSDPs and of ours, and what is doubtful about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdpbench.reports.pages import best_sentence, load_run
from fsdpbench.reports.pages.ranking import OURS_RAN_ON_GPUS, chosen, doubt, rank

MEASURED = Path(__file__).parents[3] / "ci" / "measured"


def change(run: Path, prefix: str, **changes: Any) -> None:
    """Change what the configurations whose names begin with `prefix` are and gave."""
    system = changes.pop("system", None)
    for path in run.glob(f"{prefix}*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        if system is not None:
            config = path.with_name("config.json")
            config.write_text(json.dumps(json.loads(config.read_text()) | {"system": system}))


def test_ours_has_run_on_gpus_once_that_is_measured() -> None:
    """`ci/gpu.sh` writes into `gpu`, and says so where it was a rehearsal."""
    reports = list(MEASURED.glob("gpu/*"))
    assert any("rehearsal" not in path.read_text(errors="replace") for path in reports) == OURS_RAN_ON_GPUS


def test_the_best_of_both_are_named(copy: Path) -> None:
    change(copy, "impl-fsdp2-block-pre", system="torch-fsdp2")
    found = chosen(rank(load_run(copy)))
    assert found.both
    assert found.ours is not None
    assert found.torchs is not None
    assert "torch-fsdp2, " in best_sentence(load_run(copy)).split(" or ")[0]
    assert "They reach" in best_sentence(load_run(copy))
    assert "not run on GPUs" in doubt(found.ours.row)
    assert "not run on GPUs" not in doubt(found.torchs.row)


def test_retries_of_the_best_are_a_risk(copy: Path) -> None:
    best = rank(load_run(copy))[0].row
    change(copy, best.folder.name, alloc_retries_per_step=2.0)
    assert "risky: the allocator retries" in best_sentence(load_run(copy))
