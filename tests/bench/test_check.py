"""The gate's comparison: any difference is shown, worse is worse in the metric's own direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.check.baseline import Baseline, entry_of, torch_minor
from fsdpbench.check.compare import Verdict, compare
from fsdpbench.check.metrics import METRICS, read_thresholds
from fsdpbench.check.text import as_json, as_markdown, as_text
from fsdpbench.errors import CannotJudgeError, UsageError


def an_entry(**changes: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "status": "ok",
        "device": "sim",
        "step_time_s": 0.5,
        "overlap_fraction": 0.75,
        "alloc_retries_per_step": 0,
        "ooms": 0,
        "time_s": {"exposed_communication": 0.1, "compute_only": 0.3},
        "peak_memory_bytes": {"allocated": 100, "active": 110, "reserved": 120},
        "communication": {"all_gather": {"count": 66, "bytes": 1000}},
    }
    return {**entry_of(result), **changes}


def test_equal_figures_pass() -> None:
    comparison = compare({"a": an_entry()}, {"a": an_entry()}, {})
    assert comparison.changes == ()
    assert "all figures are equal" in as_text(comparison)


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("step_time_s", 0.5000001, Verdict.WORSE),
        ("step_time_s", 0.4, Verdict.BETTER),
        ("overlap_fraction", 0.7, Verdict.WORSE),
        ("overlap_fraction", 0.8, Verdict.BETTER),
        ("all_gather_count", 67, Verdict.WORSE),
        ("all_gather_bytes", 999, Verdict.BETTER),
        ("peak_reserved_bytes", 126, Verdict.WORSE),
        ("all_reduce_count", 1, Verdict.WORSE),
    ],
)
def test_each_direction(metric: str, value: float, verdict: Verdict) -> None:
    comparison = compare({"a": an_entry()}, {"a": an_entry(**{metric: value})}, {})
    (change,) = comparison.changes
    assert (change.metric, change.verdict) == (metric, verdict)
    assert metric in as_text(comparison)
    assert metric in as_markdown(comparison)
    assert json.loads(as_json(comparison))["changes"][0]["metric"] == metric


def test_a_threshold_allows_its_metric_alone() -> None:
    after = an_entry(step_time_s=0.504, peak_active_bytes=111)
    comparison = compare({"a": an_entry()}, {"a": after}, {"step_time_s": 0.01})
    assert {change.metric: change.verdict for change in comparison.changes} == {
        "step_time_s": Verdict.ALLOWED,
        "peak_active_bytes": Verdict.WORSE,
    }


def test_running_out_of_memory_is_a_regression() -> None:
    comparison = compare({"a": an_entry()}, {"a": an_entry(status="oom")}, {})
    assert [(c.metric, c.verdict) for c in comparison.changes] == [("status", Verdict.WORSE)]


def test_configurations_of_one_side_are_named() -> None:
    comparison = compare({"a": an_entry(), "b": an_entry()}, {"b": an_entry(), "c": an_entry()}, {})
    assert (comparison.missing, comparison.added, comparison.compared) == (("a",), ("c",), 1)


def test_a_baseline_of_another_torch_cannot_judge(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    Baseline({}, {"1.0": {"configurations": {"a": an_entry()}}}).write(path)
    with pytest.raises(CannotJudgeError, match=r"torch 1\.0"):
        Baseline.read(path).configurations(path)
    Baseline({}, {torch_minor(): {"configurations": {"a": an_entry()}}}).write(path)
    assert Baseline.read(path).configurations(path) == {"a": an_entry()}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}'])
def test_what_is_no_baseline_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"baseline\.json"):
        Baseline.read(path)


def test_thresholds_name_known_metrics(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.toml"
    path.write_text("[relative_change]\nstep_time_s = 0.02\n")
    assert read_thresholds(path) == {"step_time_s": 0.02}
    path.write_text("[relative_change]\nstep_tme_s = 0.02\n")
    with pytest.raises(UsageError, match="step_tme_s"):
        read_thresholds(path)
    assert set(METRICS) >= {"step_time_s", "peak_reserved_bytes", "all_gather_bytes"}
