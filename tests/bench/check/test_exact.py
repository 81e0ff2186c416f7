"""The gate's comparison: any difference is shown, worse is worse in the metric's own direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.check.compare import Verdict, compare, diagnose
from fsdpbench.answers.check.metrics import METRICS, figures_of
from fsdpbench.answers.check.records.baseline import Baseline, Figures, FigureSet, torch_minor
from fsdpbench.answers.check.records.entries import Entry, entry_of
from fsdpbench.answers.check.text import as_json, as_markdown, as_text
from fsdpbench.answers.check.thresholds import Measured, Thresholds, read_thresholds
from fsdpbench.base.errors import CannotJudgeError, UsageError
from fsdpbench.reports.consistency import values_of


def an_entry(status: str = "ok", **changes: Any) -> Entry:
    """`changes`: figures that differ, by metric."""
    result: dict[str, Any] = {
        "status": status,
        "device": "sim",
        "step_time_s": 0.5,
        "overlap_fraction": 0.75,
        "alloc_retries_per_step": 0,
        "ooms": 0,
        "time_s": {"exposed_communication": 0.1, "compute_only": 0.05, "overlapped": 0.3},
        "peak_memory_bytes": {"allocated": 100, "active": 110, "reserved": 120},
        "communication": {
            "all_gather": {"count": 66, "bytes": 1000},
            "reduce_scatter": {"count": 33, "bytes": 500},
            "all_reduce": {"count": 0, "bytes": None},
        },
        "late_all_gathers": {"prefetched": 8, "late": 2},
        "work": {"kernels": 100, "copies": 7, "limiter_waits": 5},
    }
    entry = entry_of([result])
    figures = {name: entry.runs[0][name] for name in METRICS}  # as a baseline without witnesses holds them
    return Entry(entry.status, entry.device, ({**figures, **changes},))


def test_equal_figures_pass() -> None:
    comparison = compare({"a": an_entry()}, {"a": an_entry()}, Thresholds())
    assert comparison.changes == ()
    assert "all figures are equal" in as_text(comparison)


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("step_time_s", 0.5000001, Verdict.WORSE),
        ("step_time_s", 0.500000001, Verdict.ALLOWED),
        ("step_time_s", 0.500000006, Verdict.WORSE),
        ("step_time_s", 0.4, Verdict.BETTER),
        ("overlap_fraction", 0.7, Verdict.WORSE),
        ("overlap_fraction", 0.8, Verdict.BETTER),
        ("all_gather_count", 67, Verdict.WORSE),
        ("all_gather_bytes", 999, Verdict.BETTER),
        ("peak_reserved_bytes", 126, Verdict.WORSE),
        ("reduce_scatter_count", 34, Verdict.WORSE),
        ("compute_s", 0.36, Verdict.WORSE),
        ("copies", 8, Verdict.WORSE),
        ("prefetched_all_gathers", 7, Verdict.WORSE),
        ("limiter_waits", 0, Verdict.CHANGED),
    ],
)
def test_each_direction(metric: str, value: float, verdict: Verdict) -> None:
    comparison = compare({"a": an_entry()}, {"a": an_entry(**{metric: value})}, Thresholds())
    (change,) = comparison.changes
    assert (change.metric, change.verdict) == (metric, verdict)
    assert metric in as_text(comparison)
    assert metric in as_markdown(comparison)
    assert json.loads(as_json(comparison))["changes"][0]["metric"] == metric


def test_a_threshold_allows_its_metric_alone() -> None:
    after = an_entry(step_time_s=0.504, peak_active_bytes=111)
    comparison = compare({"a": an_entry()}, {"a": after}, Thresholds({"step_time_s": 0.01}))
    assert {change.metric: change.verdict for change in comparison.changes} == {
        "step_time_s": Verdict.ALLOWED,
        "peak_active_bytes": Verdict.WORSE,
    }


def test_running_out_of_memory_is_a_regression() -> None:
    comparison = compare({"a": an_entry()}, {"a": an_entry(status="oom")}, Thresholds())
    assert [(c.metric, c.verdict) for c in comparison.changes] == [("status", Verdict.WORSE)]


def test_configurations_of_one_side_are_named() -> None:
    comparison = compare({"a": an_entry(), "b": an_entry()}, {"b": an_entry(), "c": an_entry()}, Thresholds())
    assert (comparison.missing, comparison.added, comparison.compared) == (("a",), ("c",), 1)


def test_a_baseline_of_another_torch_cannot_judge(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    entry = an_entry()
    configurations = {"a": Figures(entry.status, entry.device, entry.known)}
    Baseline({}, {"1.0": FigureSet(configurations)}).write(path)
    with pytest.raises(CannotJudgeError, match=r"torch 1\.0"):
        Baseline.read(path).of_this_torch(path)
    Baseline({}, {torch_minor(): FigureSet(configurations)}).write(path)
    assert Baseline.read(path).of_this_torch(path).entries() == {"a": an_entry()}


def test_a_gain_alone_has_no_cause() -> None:
    comparison = compare({"a": an_entry()}, {"a": an_entry(copies=6)}, Thresholds())
    assert diagnose(comparison) == []
    assert "Keep the gain" in as_text(comparison)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"status": "splendid"}, "a.status must be one of ok, oom"),
        ({"device": None}, "a.device must be text, not None"),
        ({"runs": [{"step_tme_s": 1.0}]}, "a.step_tme_s is not a metric; did you mean step_time_s"),
        ({"runs": "x"}, "a.runs must be a list, not 'x'"),
        ({"run": []}, "a.run is not a key; did you mean runs"),
    ],
)
def test_a_baseline_is_typed(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = tmp_path / "baseline.json"
    entry = an_entry()
    written = {"status": entry.status, "device": entry.device, "runs": entry.known}
    configurations = {"a": written | change}
    path.write_text(
        json.dumps({"schema": 1, "space": {}, "sets": {"2.13": {"configurations": configurations}}})
    )
    with pytest.raises(UsageError) as refused:
        Baseline.read(path)
    assert str(refused.value).startswith(f"{path}: sets.2.13.configurations.{named}")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}'])
def test_what_is_no_baseline_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"baseline\.json"):
        Baseline.read(path)


def test_thresholds_are_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.toml"
    thresholds = Thresholds({"peak_reserved_bytes": 0.02}, Measured(0.001, {"step_time_s": 0.05}))
    thresholds.write(path)
    assert read_thresholds(path) == thresholds
    assert thresholds.least_effect("step_time_s") == 0.05
    assert not thresholds.allows("step_time_s", 1.0, 1.0000001)
    assert thresholds.allows("peak_reserved_bytes", 100, 102)
    assert not thresholds.allows("peak_reserved_bytes", 100, 103)
    assert read_thresholds(None) == Thresholds()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[relative_change]\nstep_tme_s = 0.02\n", "step_tme_s is not a metric; did you mean step_time_s"),
        ("[relative_change]\nstep_time_s = -1\n", "from 0 up"),
        ("[relative_change]\nstep_time_s = nan\n", "step_time_s must be a number from 0 up to 1, not nan"),
        ("[relative_change]\nstep_time_s = 5\n", "from 0 up to 1, not 5"),
        ("[relative_change]\nstep_time_s = '3'\n", "step_time_s must be a number"),
        ("relative_change = 3\n", "must be a table"),
        ("[relative_chang]\n", "relative_chang is not a key; did you mean relative_change"),
        (
            "[measured]\nminimum_efect = {}\n",
            r"measured\.minimum_efect is not a key; did you mean minimum_effect",
        ),
        ("[measured]\nminimum_effect = nan\n", r"measured\.minimum_effect must be a table, not nan"),
        ("[measured]\nminimum_effect = { step_time_s = nan }\n", "step_time_s must be a number"),
        ("[measured]\nminimum_effect = { step_time_s = inf }\n", "step_time_s must be a number"),
        ("[measured]\nlevel = nan\n", r"measured\.level"),
        ("[measured]\nlevel = 0\n", r"measured\.level"),
        ("[measured]\nlevel = 2\n", r"measured\.level"),
        ("[measured.minimum_effect]\nspeed = 2\n", "speed is not a metric"),
        ("[", "is not usable TOML"),
    ],
)
def test_wrong_thresholds_are_named(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "thresholds.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=named):
        read_thresholds(path)


def test_the_committed_thresholds_are_valid() -> None:
    read_thresholds(Path(__file__).parents[3] / "ci" / "thresholds.toml")


def test_retries_are_named_and_what_moves_beside_them_is_not() -> None:
    """The kernels took 0.02 % longer, because other work ran beside them: that is no cause."""
    after = an_entry(alloc_retries_per_step=1, step_time_s=0.9, compute_s=0.35 * 1.0002)
    findings = diagnose(compare({"a": an_entry()}, {"a": after}, Thresholds()))
    assert [finding.cause for finding in findings] == ["more_retries"]
    assert findings[0].sentence.startswith("1 more allocator retry a step: memory is short")


def test_all_gathers_of_a_trace_are_compared_as_those_of_a_step() -> None:
    """A trace of two steps holds twice as many as one of a single step; neither is worse."""
    by_steps = {
        steps: figures_of(
            values_of(
                {
                    "config": {"measurement": {"traced_steps": steps}},
                    "late_all_gathers": {"prefetched": steps * 8, "late": steps * 3},
                }
            )
        )
        for steps in (1, 2)
    }
    assert by_steps[1] == by_steps[2]
    assert (by_steps[2]["prefetched_all_gathers"], by_steps[2]["late_all_gathers"]) == (8, 3)
