"""Published figures whose settings are not published: with their assumptions said, and without a bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.lab.validation.coverage import group_errors, judge
from fsdpbench.lab.validation.paper_network import Prediction, config_of, network_predictions
from fsdpbench.lab.validation.runs.case import Figure, known_cases
from fsdpbench.lab.validation.text import as_markdown
from fsdpbench.reports.result import Result, Status
from fsdpbench.sweep.planning import not_applicable


def test_every_case_can_run_and_says_what_it_assumes() -> None:
    cases = known_cases("open", "torchtitan")
    assert {case.group.rpartition(", ")[2] for case in cases} == {
        "Fig 6a", "Fig 6c", "Fig 7a and 8a", "PyTorch 1.11 on AWS", "pytorch#104509", "TorchTitan",
    }  # fmt: skip
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.assumed
        assert not_applicable(config_of(case)) == {}


def test_they_have_no_bar() -> None:
    predictions = [Prediction(case, Result(status=Status.OOM)) for case in known_cases("open")]
    assert group_errors(predictions) == {}
    assert judge(predictions) == []


def test_assumptions_stand_below_the_table() -> None:
    predictions = [Prediction(case, Result(status=Status.OK)) for case in known_cases("open")]
    text = as_markdown(predictions, [])
    assert text.count("| FSDP paper, Fig 6c | 80 GB GPUs") == 1


@pytest.mark.campaign
def test_torchtitan_s_memory_is_reached(fsdpbench: Any, tmp_path: Path) -> None:
    """Which needs its selection of what is kept, our Llama's shapes, and the allocator to agree."""
    done = fsdpbench("validate", "--only", "TorchTitan", "--json", "-o", str(tmp_path / "runs"))
    cases = json.loads(done.stdout)["cases"]
    assert len(cases) == 2
    for case in cases:
        memory = next(figure for figure in case["figures"] if figure["figure"] == "reserved")
        assert memory["predicted"] == pytest.approx(memory["published"], rel=0.01), case["name"]


def test_a_time_s_error_is_its_own() -> None:
    case = next(case for case in known_cases("open") if case.published.get(Figure.RETRIES) == 46)
    prediction = Prediction(
        case, Result.of({"status": "ok", "step_time_s": 8.03, "alloc_retries_per_step": 46})
    )
    assert prediction.step_time_error == pytest.approx(0.1)
    assert prediction.error(Figure.RETRIES) == 0.0


def test_figure_2_by_the_network_alone() -> None:
    predictions = network_predictions()
    assert len(predictions) == 13
    even, into_list, uneven = (p.predicted(Figure.MILLISECONDS) for p in predictions[:3])
    assert even is not None
    assert into_list is not None
    assert uneven is not None
    assert into_list / even == pytest.approx(19.29 / 17.92, rel=0.02)
    assert uneven / even == pytest.approx(20.05 / 17.92, rel=0.01)
    pieces = [p.predicted(Figure.MILLISECONDS) for p in predictions[4:]]
    assert pieces == sorted(pieces)  # latency counts more in smaller pieces
