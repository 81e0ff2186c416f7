"""Memory over the steps of a soak: peaks, fragments, retries, and where memory ran out."""

from __future__ import annotations

import msgspec

from fsdpbench.reports.pages.memory_charts import soak_chart
from fsdpbench.reports.result import OverSteps, SoakReport

GIB = 2**30


def soak(steps: int, retried: int) -> SoakReport:
    over = OverSteps(
        training_step=list(range(1, steps + 1)),
        allocated=[GIB * step for step in range(1, steps + 1)],
        reserved=[2 * GIB * step for step in range(1, steps + 1)],
        inactive_split=[GIB // 2] * steps,
        alloc_retries=[int(step == retried) for step in range(1, steps + 1)],
    )
    return SoakReport(
        steps,
        steps,
        over,
        retries=1,
        first_retry_step=retried,
        last_device_alloc_step=3,
        out_of_memory_step=4,
    )


def test_the_chart_marks_retries_and_its_table_says_when() -> None:
    chart = soak_chart(soak(4, 2), 80.0 * GIB)
    assert chart is not None
    allocated, reserved, fragments, retries = chart.figure()["data"]
    assert (allocated["x"], allocated["y"]) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert reserved["y"] == [2, 4, 6, 8]
    assert fragments["y"] == [0.5] * 4
    assert (retries["x"], retries["y"]) == ([2], [4])
    assert chart.figure()["layout"]["shapes"][0]["y0"] == 80
    said = {row[0]: row[1:] for row in chart.table.rows}
    assert said["peak reserved"] == ("8.0", "4")
    assert said["first of 1 allocator retries"] == ("", "2")
    assert said["out of memory"] == ("", "4")


def test_a_report_of_an_earlier_version_is_read_without_its_replay() -> None:
    earlier = {"executed": 28, "replayed": 972, "executed_because": {"it makes a stream": 1}}
    assert msgspec.convert(msgspec.to_builtins(soak(4, 2)) | earlier, SoakReport) == soak(4, 2)


def test_a_long_soak_keeps_its_peaks_in_fewer_points() -> None:
    chart = soak_chart(soak(2500, 2), None, most_points=1000)
    assert chart is not None
    assert len(chart.figure()["data"][0]["x"]) <= 1000
    assert max(chart.figure()["data"][0]["y"]) == 2500


def test_a_device_without_account_of_memory_has_no_chart() -> None:
    nothing = OverSteps([1], [None], [None], [None], [None])
    assert soak_chart(SoakReport(1, 1, nothing), None) is None
