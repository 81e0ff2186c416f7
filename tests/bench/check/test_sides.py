"""What `compare`, `check` and `baseline` read, what they refuse, and their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fsdpbench.answers.check.records.baseline import Baseline
from fsdpbench.answers.check.records.sides import read_side
from fsdpbench.answers.check.thresholds import read_thresholds
from fsdpbench.base.errors import CannotJudgeError, ExitCode, UsageError
from fsdpbench.cli.commands.check import baseline_command, command, compare_command

STEPS = [0.100, 0.103, 0.101, 0.102, 0.104, 0.1005, 0.1015, 0.1025]


def run(command: Any, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


def a_result(step: float, **changes: Any) -> dict[str, Any]:
    """A measured result of the fields that the gate reads; `changes` by name, machine and torch too."""
    machine = {"host": "somewhere", "processor": changes.pop("processor", "a processor"), "cores": 2}
    versions = {"torch": changes.pop("torch", "2.13.0+cpu"), "python": "3.11.7"}
    return {
        "status": "ok",
        "device": "cpu",
        "hardware": {"name": "cpu"},
        "config": {"model": "gpt", "shape": {"layers": 2}, "gpus_per_node": 2, "data": None},
        "environment": {"versions": versions, "machine": machine, "variables": {}},
        "step_time_s": step,
        "measured": {"step_times_s": [step * 0.99, step, step * 1.1]},
        "communication": {"all_gather": {"count": 9, "bytes": 900}},
        "bench": {"started": "2026-01-01T00:00:00+00:00"},
    } | changes


@pytest.fixture
def write_sweep(tmp_path: Path) -> Callable[..., Path]:
    """Writes a measured sweep of one repeated configuration."""

    def write(label: str, factor: float = 1.0, runs: int = len(STEPS), **changes: Any) -> Path:
        folder, point = tmp_path / label, "impl-fsdp2-block-0123abcd"
        for number, step in enumerate(STEPS[:runs], 1):
            path = folder / (point if number == 1 else f"{point}.run{number}")
            path.mkdir(parents=True)
            config = {"name": "impl-fsdp2-block", "key": "0123abcd"}
            (path / "config.json").write_text(json.dumps(config))
            result = a_result(step * factor, **changes)
            if number == 1:  # as the store merges repeats: the median in place of its own
                steps = [s * factor for s in STEPS]
                result["repeats"] = {
                    "runs": len(steps),
                    "failed": 0,
                    "step_time_s": steps,
                    "samples_s": [[s] for s in steps],
                }
                result["step_time_s"] = median(steps)
            (path / "result.json").write_text(json.dumps(result))
        (folder / "sweep.toml").write_text(f'schema = 1\nmodel = "gpt"\npoints = ["{point}"]\n')
        return folder

    return write


def test_a_repeated_sweep_has_a_figure_a_run(write_sweep: Callable[..., Path]) -> None:
    side = read_side(write_sweep("a"))
    (entry,) = side.entries.values()
    assert sorted(entry.values("step_time_s")) == sorted(STEPS)
    assert entry.values("all_gather_count") == [9] * len(STEPS)


def test_compare_finds_a_slower_side(write_sweep: Callable[..., Path]) -> None:
    before, after = write_sweep("a"), write_sweep("b", 1.1)
    worse = run(compare_command, before, after)
    assert worse.exit_code == ExitCode.REGRESSION
    assert "a step takes 10.0% more time" in worse.output
    assert run(compare_command, before, before).exit_code == ExitCode.OK
    better = run(compare_command, after, before, "--format", "md")
    assert better.exit_code == ExitCode.OK
    assert "| better | impl-fsdp2-block | step_time_s |" in better.output


def test_sides_one_after_the_other_are_noted(write_sweep: Callable[..., Path]) -> None:
    later = write_sweep("b", bench={"started": "2026-01-02T00:00:00+00:00"})
    told = run(compare_command, write_sweep("a"), later, "--json")
    assert "one after the other" in json.loads(told.output)["notes"][0]


def test_a_comparison_says_eager_or_compiled(write_sweep: Callable[..., Path]) -> None:
    eager, compiled = write_sweep("a", compiled=False), write_sweep("b", compiled=True)
    told = run(compare_command, eager, compiled, "--json")
    assert json.loads(told.output)["notes"] == [f"{eager}: eager; {compiled}: compiled"]
    assert "note: both sides: compiled" in run(compare_command, compiled, compiled).output


def test_github_benchmark_has_the_newer_sides_figures(write_sweep: Callable[..., Path]) -> None:
    told = run(compare_command, write_sweep("a"), write_sweep("b"), "--format", "github-benchmark")
    rows = {row["name"]: row for row in json.loads(told.output)}
    step = rows["impl-fsdp2-block: step_time_s"]
    assert step["unit"] == "s"
    assert step["value"] == pytest.approx(0.10175)
    assert step["range"].startswith("± 0.00")
    assert all(isinstance(row["value"], int | float) for row in rows.values())
    assert not any("overlap_fraction" in name for name in rows)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"torch": "2.12.1"}, "torch: 2.13 against 2.12"),
        ({"processor": "another one"}, "processor: a processor against another one"),
        ({"device": "cuda"}, "device: cpu against cuda"),
        ({"config": {"model": "llama"}}, "model: gpt against llama"),
        ({"config": {"model": "gpt", "shape": {"layers": 3}}}, "shape layers: 2 against 3"),
        ({"environment": {"variables": {"NCCL_ALGO": "Ring"}}}, "variable NCCL_ALGO: unknown against Ring"),
    ],
)
def test_sides_that_are_not_alike_are_refused(
    write_sweep: Callable[..., Path], changes: dict[str, Any], named: str
) -> None:
    refused = run(compare_command, write_sweep("a"), write_sweep("b", **changes))
    assert isinstance(refused.exception, CannotJudgeError)
    assert named in str(refused.exception)


def test_too_few_runs_are_refused(write_sweep: Callable[..., Path]) -> None:
    refused = run(compare_command, write_sweep("a", runs=2), write_sweep("b", runs=2))
    assert isinstance(refused.exception, CannotJudgeError)
    assert "--repeat" in str(refused.exception)


def test_what_holds_no_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"some": "thing"}')
    for path in (tmp_path, tmp_path / "missing.json", tmp_path / "other.json"):
        with pytest.raises(UsageError, match=path.name):
            read_side(path)


def test_a_baseline_is_created_and_checked(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    done = run(baseline_command, "create", write_sweep("a"), file)
    assert done.exit_code == 0, done.exception
    ((torch_version, stored),) = Baseline.read(file).sets.items()
    assert torch_version
    assert stored.provenance is not None
    assert stored.provenance.date
    assert stored.surroundings["processor"] == "a processor"
    assert "somewhere" not in file.read_text()
    assert run(command, write_sweep("b"), "--baseline", file).exit_code == ExitCode.OK
    worse = run(command, write_sweep("c", 1.1), "--baseline", file)
    assert worse.exit_code == ExitCode.REGRESSION
    other = run(command, write_sweep("d", processor="another"), "--baseline", file)
    assert isinstance(other.exception, CannotJudgeError)


def test_noise_writes_thresholds(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    done = run(command, write_sweep("a"), "--noise", "--thresholds", file)
    assert done.exit_code == 0, done.exception
    assert "99 % of comparisons stay below" in done.output
    assert read_thresholds(file).measured.minimum_effect == {"step_time_s": 0.03, "fastest_step_s": 0.03}


def test_a_baseline_runs_its_own_sweep(tmp_path: Path) -> None:
    """Updated from nothing but its space, it then finds the same code equal, to the last digit."""
    file = tmp_path / "baseline.json"
    space = {"schema": 1, "model": "gpt-125m", "shape": "layers=2", "device": "sim", "hardware": "a100-80gb"}
    space |= {"gpus": 8, "system": ["impl-fsdp2"], "settings": {"batch": [1], "seq": [256]}}
    Baseline(space, {}).write(file)
    updated = run(baseline_command, "update", file)
    assert updated.exit_code == 0, updated.exception
    checked = run(command, "--baseline", file)
    assert checked.exit_code == ExitCode.OK, checked.exception
    assert "1 configuration compared: all figures are equal." in checked.output
    assert isinstance(run(command, "--baseline", file, "--noise").exception, CannotJudgeError)


def test_check_without_a_baseline_says_what_it_needs(tmp_path: Path) -> None:
    refused = run(command, tmp_path)
    assert isinstance(refused.exception, UsageError)
    assert "--baseline" in str(refused.exception)
