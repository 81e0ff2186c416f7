"""What is recommended: the best of torch's FSDPs and of ours, and what is doubtful about it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.pages import best_lines, load_run
from fsdpbench.reports.pages.ranking import NOT_YET, OURS_RAN_ON_GPUS, UNSHARED, chosen, doubt, paired, rank
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.result import ConfigFile, Interval, Result
from fsdpbench.reports.result import Status as Ended

MEASURED = Path(__file__).parents[3] / "ci" / "measured"


def change(run: Path, prefix: str, **changes: Any) -> None:
    """Change what the configurations whose names begin with `prefix` are and gave."""
    system = changes.pop("system", None)
    for path in run.glob(f"{prefix}*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        if system is not None:
            config = path.with_name("config.json")
            config.write_text(json.dumps(json.loads(config.read_text()) | {"system": system}))


def test_ours_has_run_on_several_gpus_once_that_is_measured() -> None:
    """`ci/gpu.sh` lists the GPUs in `gpu/machine.txt`, and says so where it was a rehearsal."""
    machine = (MEASURED / "gpu" / "machine.txt").read_text()
    assert ("rehearsal" not in machine and machine.count("\nNVIDIA ") > 1) == OURS_RAN_ON_GPUS


def test_torchs_is_recommended_and_ours_beside_it_where_it_is_clearly_faster(copy: Path) -> None:
    change(copy, "impl-fsdp2-block-pre", system="torch-fsdp2")
    for ours, words in ((2.0, "; or impl-fsdp1 alike: +"), (0.5, None)):
        best = chosen(rank(load_run(copy))).torchs
        assert best is not None
        assert best.throughput is not None
        change(copy, "impl-fsdp1-block-pre-bf16", tokens_per_s_per_gpu=best.throughput * ours)
        first = best_lines(load_run(copy))[0]
        assert first.startswith("Run torch-fsdp2")
        assert (NOT_YET in first) == (words is not None)
    found = chosen(rank(load_run(copy)))
    assert found.ours is not None
    assert NOT_YET in doubt(found.ours.row)
    assert NOT_YET not in doubt(best.row)


def test_retries_of_the_best_are_a_risk(copy: Path) -> None:
    for path in copy.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"alloc_retries_per_step": 2.0}))
    assert "risky: the allocator retries" in best_lines(load_run(copy))[0]


def row(name: str, tokens: float, waiting: float = 0.0, width: float = 0.07, **more: Any) -> Configuration:
    """Return a simulated row whose step waits for that share of the time that it computes."""
    work, step = 1 / (1 + waiting), (1 - width, 1 + width)
    interval = Interval(0.9, step, apart=0.05, runs=9, work=work, **more)
    result = Result(status=Ended.OK, device="sim", tokens_per_s_per_gpu=tokens, interval=interval)
    config = ConfigFile(settings={}, name=name)
    return Configuration(Path(name), config, result, Status.OK, settings={"system": "torch-fsdp2"})


def test_what_two_configurations_share_does_not_blur_their_difference() -> None:
    rows = [
        row("best", 100.0),
        row("near", 99.0),
        row("waits", 95.0, waiting=0.0526),
        row("wide", 94.0, width=0.2),
        row("unlike", 93.0, because=["no published run of this system"]),
    ]
    found = {entry.row.name: entry for entry in rank(RunView(Path("run"), "run", tuple(rows)))}
    assert [entry.rank for entry in found.values()] == [1, 1, 3, 3, 3]
    behind = paired(found["waits"], found["best"])
    error = math.log1p(behind.high) - math.log1p(behind.change)
    assert error == pytest.approx(UNSHARED + 0.07 * 0.0526, rel=0.02), "the wait is not shared"
    wide = paired(found["wide"], found["best"])
    assert math.log1p(wide.high) - math.log1p(wide.change) > 0.13, "nor is the wider interval"


@pytest.mark.parametrize(("gain", "is_taken"), [(0.0005, False), (0.002, True)])
def test_a_setting_that_changes_nothing_is_left_at_its_default(gain: float, is_taken: bool) -> None:
    settings = {"system": "torch-fsdp2", "backward_prefetch": "none"}
    without = replace(row("without", 100 * (1 + gain)), settings=settings)
    rows = row("default", 100.0), without, row("slow", 90.0)
    best = chosen(rank(RunView(Path("run"), "run", rows))).torchs
    assert best is not None
    assert best.row.name == ("without" if is_taken else "default")


def test_the_lines_are_short(copy: Path) -> None:
    lines = best_lines(load_run(copy))
    assert len(lines) == 3
    assert all(len(line.split()) <= 25 for line in lines)
