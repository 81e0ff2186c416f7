"""`fsdpbench plan`: points, what cannot fit and why, time and disk; nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.explain import advice
from fsdpbench.answers.tune import per_unit
from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import ExitCode
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.machine_state import available_memory
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.result import Result
from fsdpbench.sweep import prediction
from fsdpbench.sweep import trials as trials_module
from fsdpbench.sweep.planning import make_config, make_target
from fsdpbench.sweep.prediction import PROBE, as_simulated
from fsdpbench.sweep.trials import Trial

Plan = Callable[..., dict[str, Any]]
FOUR_LAYERS = (
    "--model gpt-2.8b --shape layers=4 --gpus 8 --device sim --system impl-fsdp2 --wrap block "
    "--backward-prefetch pre --reduce-dtype fp32"
)


@pytest.fixture
def planned(fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    def plan(*words: str) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        done = fsdpbench("plan", *words, "--json")
        assert done.returncode == 0, done.stderr
        assert list(tmp_path.iterdir()) == []
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return plan


def test_it_tells_what_cannot_fit_on_simulated_gpus(planned: Plan) -> None:
    plan = planned(*FOUR_LAYERS.split(), "--batch", "4,400")
    small, large = (point["prediction"] for point in plan["points"])
    assert small["fits"] is True
    assert 0 < small["peak_reserved_bytes"] < 80 * 2**30
    assert small["step_time_s"] > 0
    low, high = small["interval"]["step_time_s"]
    assert low < small["step_time_s"] < high
    assert (small["risky"], small["rank"]) == (False, 1)
    assert (large["interval"], large["rank"]) == (None, None)
    assert large["fits"] is False
    assert "out of memory" in large["reason"]
    assert plan["estimate"]["wall_s"] > 0
    assert plan["estimate"]["disk_bytes"] > 10_000


@pytest.mark.campaign
def test_by_unit_is_never_slower_than_the_points(planned: Plan, matches_schema: Any) -> None:
    words = "--model gpt-125m --shape layers=2 --gpus 8 --device sim --system torch-fsdp2 --seq 1024"
    plan = planned(*words.split(), "--batch", "96,192", "--activation-checkpointing", "full", "--per-unit")
    matches_schema("plan", plan)
    by_unit = plan["per_unit"]
    assert set(by_unit["settings"]) <= set(plan["points"][0]["config"]["settings"])
    assert by_unit["uniform"] in [point["name"] for point in plan["points"]]
    low, high = by_unit["gain"]["interval"]
    assert low < by_unit["gain"]["change"] < high
    assert by_unit["gain"]["change"] > 0.05, "at batch 96 nothing has to be recomputed"
    assert by_unit["best"] not in [point["name"] for point in plan["points"]]


def test_that_nothing_fits_by_unit_is_an_answer(
    fsdpbench: Any, planned: Plan, matches_schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_fits(*args: object) -> None:
        raise per_unit.NothingFitsError("no choice by unit fits")

    monkeypatch.setattr(per_unit, "choose", none_fits)
    words = ["--model", "gpt-tiny", "--gpus", "2", "--device", "sim", "--batch", "2,4", "--per-unit"]
    plan = planned(*words)
    matches_schema("plan", plan)
    assert plan["per_unit"] is None
    done = fsdpbench("plan", *words)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "no choice by unit fits")


def test_by_unit_needs_simulated_gpus(fsdpbench: Any) -> None:
    done = fsdpbench("plan", *FOUR_LAYERS.split(), "--no-predict", "--per-unit")
    assert done.returncode == 2
    assert "--per-unit chooses on simulated GPUs: --device sim" in done.stderr


def test_the_table_names_the_fastest_point_and_tells_a_reason_once(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fsdpbench("plan", *FOUR_LAYERS.split(), "--batch", "2,4,400,800")
    assert done.returncode == 0, done.stderr
    best, header, *lines = done.stdout.splitlines()
    assert best == "Fastest that fits: impl-fsdp2, batch 4; 2 of 4 fit"
    assert {"batch", "/s/GPU", "ms"} <= set(f"{header} {lines[0]}".split())
    assert lines[1].count(" ±") == 1
    assert any("no published run of this system" in line for line in lines)
    assert lines[1].split()[1] == "4"
    (printed,) = [line for line in lines if "out of memory" in line]
    assert printed.startswith("cannot fit: impl-fsdp2, batch 400 and 1 more: ")
    assert "  the nearest that fits: impl-fsdp2, batch 4" in lines


def test_of_several_numbers_of_gpus_each_line_says_its_own(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "plan --model gpt-tiny --gpus 8,16 --device sim --batch 4"
    best = fsdpbench(*words.split()).stdout.splitlines()[0]
    assert best.endswith((", 8 GPUs; 2 of 2 fit", ", 16 GPUs; 2 of 2 fit"))


def test_where_nothing_fits_it_says_what_would_make_it_fit(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted, every = "--batch 20000 --grad-accum 2", advice.changes_for
    monkeypatch.setattr(
        advice, "changes_for", lambda *asked: [each for each in every(*asked) if each.write == wanted]
    )
    words = "plan --model gpt-tiny --gpus 8 --device sim --system impl-fsdp2 --batch 50000,40000"
    lines = fsdpbench(*words.split()).stdout.splitlines()
    at = lines.index("Nothing fits. Of impl-fsdp2, batch 40000:")
    assert lines[at + 1].startswith("It needs 110")
    assert lines[at + 3].startswith(f"  {wanted} ")


def test_of_two_systems_that_cannot_be_distinguished_torchs_is_named(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    systems = "--batch", "2,4", "--system", "impl-fsdp2,torch-fsdp2"
    best, *lines = fsdpbench("plan", *FOUR_LAYERS.split(), *systems).stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("1=")] == ["impl-fsdp2", "torch-fsdp2"]
    assert best == "Fastest that fits: torch-fsdp2, batch 4; 4 of 4 fit"


def test_on_a_cpu_memory_of_all_ranks_is_held_against_the_machine(planned: Plan) -> None:
    words = [
        "--model",
        "gpt-2.8b",
        "--shape",
        "layers=1",
        "--device",
        "cpu",
        "--gpus",
        "2",
        "--wrap",
        "block",
    ]
    space = ["--system", "impl-fsdp2", "--batch", "1,60000", "--backward-prefetch", "pre", "--seq", "16"]
    plan = planned(*words, *space)
    small, large = (point["prediction"] for point in plan["points"])
    assert small["step_time_s"] > 0
    # Weights, gradients and moments of one layer and two embeddings: 336 M parameters of 16 bytes, at least.
    assert small["peak_reserved_bytes"] > 16 * 336e6
    # 60,000 samples of 16 tokens have logits of 193 GB, more than two of the largest GPUs would hold.
    roomy = (available_memory() or 0) > 2 * 141 * 10**9
    assert large["fits"] is (None if roomy else False)
    assert "out of memory" in large["reason"]


def test_without_prediction_it_lists_in_no_time(planned: Plan) -> None:
    plan = planned("--model", "gpt-tiny", "--preset", "hybrid", "--gpus", "16", "--no-predict")
    assert plan["estimate"] is None
    assert len(plan["points"]) == 16
    assert all("prediction" not in point for point in plan["points"])


def test_a_bad_space_is_a_usage_error(fsdpbench: Any) -> None:
    done = fsdpbench("plan", "--model", "gpt-tiny", "--batch", "0", "--no-predict")
    assert done.returncode == 2
    assert "batch" in done.stderr


@pytest.mark.parametrize("failed", [Status.ERROR, Status.CRASH, Status.TIMEOUT])
def test_a_point_whose_simulation_failed_does_not_count_as_fitting(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: Status
) -> None:
    def run_in(folder: Path, configs: Sequence[Config], *rest: Any) -> list[Trial]:
        broken = Result(status=failed, cause="no step")
        trials = trials_module.run_in(folder, configs, *rest)
        return [replace(each, result=broken) if each.config.settings.batch == 8 else each for each in trials]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prediction, "run_in", run_in)
    words = "plan --model gpt-tiny --gpus 8 --device sim --system impl-fsdp2 --batch"
    done = fsdpbench(*words.split(), "4,8")
    assert done.returncode == ExitCode.SOME_FAILED
    assert done.stdout.startswith("Fastest that fits: impl-fsdp2, batch 4; 1 of 2 fit\n")
    assert "\nnot known whether it fits: impl-fsdp2, batch 8: no step\n" in done.stdout
    assert "2 configurations, eager, 0 cannot fit, of 1 it is not known; " in done.stdout
    as_json = fsdpbench(*words.split(), "8", "--wrap", "block,root", "--json")
    assert as_json.returncode == ExitCode.SOME_FAILED
    points = json.loads(as_json.stdout)["points"]
    assert [point["prediction"]["fits"] for point in points] == [None, None]


def test_the_time_limit_is_that_of_each_simulation() -> None:
    target = make_target(
        model="gpt-tiny", shape={}, device="sim", hardware="a100-80gb", gpus=8, gpus_per_node=None, data=None,
        measurement=Measurement(1, 1, 1, timeout_s=7.0),
    )  # fmt: skip
    simulated = as_simulated(make_config(target, "impl-fsdp2", Settings.of(batch=2), target.workload()))
    assert simulated is not None
    assert simulated.measurement == replace(PROBE, timeout_s=7.0)
