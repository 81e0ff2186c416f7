"""Figure 7c of the FSDP paper: its cases, and the bar that they are held to."""

from __future__ import annotations

import pytest

from fsdpbench.lab.validation.coverage import group_errors, judge
from fsdpbench.lab.validation.paper_network import Prediction, config_of
from fsdpbench.lab.validation.runs.case import known_cases
from fsdpbench.reports.result import Result


def predictions(factor: float) -> list[Prediction]:
    """As if every case had been simulated at `factor` times its published speed."""
    return [
        Prediction(case, Result.of({"status": "ok", figure.path[0]: factor * value}))
        for case in known_cases("t5")
        for figure, value in case.published.items()
    ]


def test_cases_are_the_papers_points() -> None:
    cases = known_cases("t5")
    assert len({case.name for case in cases}) == 14
    configs = [config_of(case, "torch-fsdp1") for case in cases]
    assert {config.gpus for config in configs} == {8, 16, 32, 64, 128, 256, 512}
    assert {config.settings.batch for config in configs} == {8, 16}
    assert {config.settings.seq for config in configs} == {512}
    assert configs[0].shape["d_ff"] == 65536


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (0.96, True), (0.94, False), (1.06, False)])
def test_the_bar_is_five_percent_of_the_step_time(factor: float, met: bool) -> None:
    (bar,) = judge(predictions(factor))
    assert bar.name == "Fig 7c, T5-11B"
    assert bar.met is met


def test_what_the_paper_leaves_open_keeps_them_out_of_the_mean() -> None:
    assert all(case.assumed for case in known_cases("t5"))
    assert group_errors(predictions(0.5)) == {}
