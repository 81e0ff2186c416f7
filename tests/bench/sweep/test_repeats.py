"""Repeated runs: interleaved, merged into one result, kept beside the first."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.reports.result import Result, Status
from fsdpbench.sweep.runner import interleaved, merged


def config(batch: int) -> Config:
    return Config(
        model="gpt-tiny", shape={}, system="torch-ddp", device="cpu", hardware=None, gpus=2, gpus_per_node=2,
        settings=Settings.of(batch=batch), measurement=Measurement.default_for("cpu"),
    )  # fmt: skip


def result(step: float, samples: list[float]) -> Result:
    measured = {"step_times_s": samples}
    speed = 100.0 / step
    return Result.of(
        {"status": "ok", "step_time_s": step, "tokens_per_s_per_gpu": speed, "measured": measured}
    )


def test_rounds_alternate_their_direction_so_that_a_drift_meets_all_alike() -> None:
    points = [config(batch) for batch in (1, 2, 3)]
    order = [(run.config.settings.batch, run.number) for run in interleaved(points, 3)]
    assert order == [(1, 1), (2, 1), (3, 1), (3, 2), (2, 2), (1, 2), (1, 3), (2, 3), (3, 3)]


def test_the_run_is_the_replicate() -> None:
    runs = [result(2.0, [1.9, 2.1]), result(4.0, [4.0]), result(3.0, [3.0]), Result(status=Status.TIMEOUT)]
    together = merged(runs[0], runs[1:])
    assert together.step_time_s == 3.0
    assert together.tokens_per_s_per_gpu == pytest.approx(100.0 / 3.0)
    repeats = together.repeats
    assert repeats is not None
    assert repeats.step_time_s == [2.0, 4.0, 3.0]
    assert repeats.samples_s == [[1.9, 2.1], [4.0], [3.0]]
    assert (repeats.runs, repeats.failed) == (4, 1)
    assert repeats.spread == pytest.approx(1.0 / 3.0)


def test_merging_again_starts_from_the_first_run() -> None:
    first, second, third = (result(step, [step]) for step in (2.0, 4.0, 9.0))
    once = merged(first, [second])
    assert merged(once, [second]) == once
    grown = merged(once, [second, third])
    assert grown.step_time_s == 4.0
    assert grown.tokens_per_s_per_gpu == pytest.approx(25.0)


@pytest.mark.campaign
def test_a_repeated_sweep_keeps_every_run_and_can_be_grown(fsdpbench: Any, tmp_path: Path) -> None:
    shape = "layers=1,d_model=32,heads=2,vocab=64,max_seq=16"
    words = ["sweep", "--model", "gpt", "--shape", shape, "--gpus", "1", "--device", "cpu", "--batch", "1,2"]
    folder = tmp_path / "run"

    def swept(repeat: int) -> Any:
        done = fsdpbench(*words, "--system", "single", "-o", str(folder), "--repeat", str(repeat))
        assert done.returncode == 0, done.stderr
        return done.stderr

    swept(1)
    first = {path: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    assert len(first) == 2
    assert "2 of 4 configurations are done already" in swept(2)
    for path, alone in first.items():
        together = json.loads(path.read_text())
        again = json.loads((path.parent.with_name(path.parent.name + ".run2") / "result.json").read_text())
        steps = [alone["step_time_s"], again["step_time_s"]]
        assert together["repeats"]["step_time_s"] == steps
        assert together["step_time_s"] == median(steps)
