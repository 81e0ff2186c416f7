"""Each kind of regression, planted in the code of a simulated sweep, is caught and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.check.compare import Comparison, compare, diagnose
from fsdpbench.answers.check.records.baseline import require_alike
from fsdpbench.answers.check.records.sides import read_side
from fsdpbench.answers.check.text import as_markdown, as_text
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.base.errors import ExitCode


def compared(planted: Path, variant: str) -> Comparison:
    before, after = read_side(planted / "base"), read_side(planted / variant)
    require_alike(before.surroundings, after.surroundings)
    return compare(before.entries, after.entries, Thresholds())


@pytest.mark.parametrize(
    ("variant", "cause", "metric", "systems"),
    [
        ("no_prefetch", "less_prefetch", "exposed_communication_s", 2),
        # Only where a limiter is: fully_shard hands memory over by events.
        ("no_limiter", "limiter_off", "peak_reserved_bytes", 1),
        ("another_all_gather", "more_all_gathers", "all_gather_count", 2),
        ("another_copy", "more_copies", "copies", 2),
        ("slower_kernels", "slower_kernels", "compute_s", 2),
        ("more_memory", "more_memory", "peak_allocated_bytes", 2),
    ],
)
def test_it_is_caught_and_named(planted: Path, variant: str, cause: str, metric: str, systems: int) -> None:
    comparison = compared(planted, variant)
    finding = diagnose(comparison)[0]
    assert finding.cause == cause
    assert len(finding.configurations) == systems
    assert sum(change.metric == metric for change in comparison.regressions) == systems
    assert finding.sentence in as_text(comparison)
    assert finding.sentence in as_markdown(comparison)


def test_how_much_is_said_exactly(planted: Path) -> None:
    """Four blocks, gathered in forward and in backward, and the root, gathered once."""
    for variant, metric, more in (
        ("another_all_gather", "all_gather_count", 2 * 4 + 1),
        ("another_copy", "copies", 4 + 1),
    ):
        for change in compared(planted, variant).regressions:
            if change.metric == metric:
                assert isinstance(change.after, int)
                assert isinstance(change.before, int)
                assert change.after - change.before == more


def test_the_same_code_is_equal(planted: Path) -> None:
    assert compared(planted, "base").changes == ()


def test_the_command_ends_with_1_and_says_why(planted: Path, fsdpbench: Any) -> None:
    done = fsdpbench("compare", str(planted / "base"), str(planted / "another_copy"), "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["causes"][0]["cause"] == "more_copies"
    assert {change["verdict"] for change in told["changes"]} >= {"worse"}


def test_a_simulated_baseline_judges_a_planted_regression(
    planted: Path, fsdpbench: Any, tmp_path: Path
) -> None:
    file, base = str(tmp_path / "baseline.json"), str(planted / "base")
    assert fsdpbench("baseline", "create", base, file).returncode == 0
    assert fsdpbench("check", base, "--baseline", file).returncode == ExitCode.OK
    worse = fsdpbench("check", str(planted / "another_all_gather"), "--baseline", file)
    assert worse.returncode == ExitCode.REGRESSION
    assert "more all-gathers a step" in worse.stdout


def test_two_configurations_are_compared_whatever_their_names(planted: Path, fsdpbench: Any) -> None:
    first, second = (next((planted / "base").glob(f"{system}-*")) for system in ("impl-fsdp1", "impl-fsdp2"))
    told = json.loads(fsdpbench("compare", str(first), str(second), "--json").stdout)
    assert told["compared"] == 1
    name = told["changes"][0]["configuration"]
    assert name.startswith("impl-fsdp1-block")
    assert " -> impl-fsdp2-block" in name
    by_file = fsdpbench("compare", str(first / "result.json"), str(second / "result.json"), "--json")
    assert json.loads(by_file.stdout)["changes"] == told["changes"]
