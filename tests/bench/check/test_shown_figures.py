"""What is judged and what is printed agree: figures that look equal are never called worse."""

from __future__ import annotations

import math

import pytest

from fsdpbench.answers.check.compare import Verdict, compare
from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.text import as_text, shown_pair, shown_percent
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.figures import Worse

RUN = {
    "step_time_s": 1.890182549,
    "exposed_communication_s": 0.005043546,
    "compute_s": 1.844367287,
    "overlap_fraction": 0.9409716745036827,
    "peak_allocated_bytes": 71226052096,
    "peak_active_bytes": 71403074560,
    "peak_reserved_bytes": 77391200256,
    "alloc_retries_per_step": 1.0,
    "all_gather_count": 65,
    "all_gather_bytes": 10596198400,
    "kernels": 1082.5,
}


def verdicts(metric: str, after: float, thresholds: Thresholds | None = None) -> tuple[list[Verdict], str]:
    entries = [Entry(Status.OK, "sim", (run,)) for run in (RUN, {**RUN, metric: after})]
    comparison = compare({"a": entries[0]}, {"a": entries[1]}, thresholds or Thresholds())
    return [change.verdict for change in comparison.changes], as_text(comparison)


@pytest.mark.parametrize("metric", RUN)
def test_the_smallest_change_that_counts_is_seen(metric: str) -> None:
    """Ever smaller changes for the worse: as long as it is called worse, both figures are printed apart."""
    sign = 1 if METRICS[metric].worse is Worse.HIGHER else -1
    counted = []
    for power in range(1, 17):
        after = (
            RUN[metric] * (1 + sign * 10.0**-power)
            if metric != "overlap_fraction"
            else RUN[metric] - 10.0**-power
        )
        found, told = verdicts(metric, after)
        if Verdict.WORSE in found:
            before_text, after_text = shown_pair(metric, RUN[metric], after)
            assert before_text != after_text
            assert before_text in told
            assert after_text in told
            counted.append(power)
    assert counted
    assert counted[0] == 1
    assert verdicts(metric, math.nextafter(RUN[metric], sign * math.inf))[0] in ([], [Verdict.ALLOWED])


@pytest.mark.parametrize("more", [1, 512, 10_485])
def test_less_bytes_than_two_decimals_show_are_no_regression(more: int) -> None:
    found, told = verdicts("peak_reserved_bytes", RUN["peak_reserved_bytes"] + more)
    assert found == [Verdict.ALLOWED]
    assert "0 figures worse" in told


def test_more_bytes_are_one_and_so_is_each_byte_where_thresholds_say_so() -> None:
    assert verdicts("peak_reserved_bytes", RUN["peak_reserved_bytes"] + 10_486)[0] == [Verdict.WORSE]
    strict = Thresholds({"peak_reserved_bytes": 0.0})
    assert verdicts("peak_reserved_bytes", RUN["peak_reserved_bytes"] + 1, strict)[0] == [Verdict.WORSE]
    assert Thresholds().allows("all_gather_bytes", 2000, 2001)
    assert not Thresholds().allows("all_gather_bytes", 2000, 2002)


def test_a_small_percentage_is_not_told_as_none() -> None:
    assert [shown_percent(share) for share in (0.1, 1e-6, -2e-9, 0.0, None)] == [
        "+10.00%",
        "+0.0001%",
        "-2e-07%",
        "+0.00%",
        "",
    ]
