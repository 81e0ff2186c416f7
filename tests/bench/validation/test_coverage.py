"""Runs inside their intervals with their source held out; errors in sample and held out apart."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.engine.results.residuals.widths import Condition, Quantity, Unknown, width_of
from fsdpbench.lab.validation.coverage import HALF_WIDTH, groups_of, interval_bars, judged_runs
from fsdpbench.lab.validation.paper_network import Prediction, config_of
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.lab.validation.text import as_dict, as_markdown, write_page
from fsdpbench.reports.result import Result, Status

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ci"))
from residual_rows import residuals_of, under


def a_case(name: str = "run", source: str = "someone", **changes: Any) -> Case:
    given: dict[str, Any] = {
        "name": name, "group": source, "source": source, "model": "gpt-2.8b", "hardware": "a100-80gb",
        "gpus": 8, "settings": {"seq": 2048}, "published": {Figure.TOKENS: 1000.0}, "system": "torch-fsdp1",
    }  # fmt: skip
    return Case(**(given | changes))


def predicted(case: Case, tokens: float = 1000.0, **figures: Any) -> Prediction:
    result = {"status": "ok", "config": config_of(case).to_dict(), "alloc_retries_per_step": 0.0}
    return Prediction(case, Result.of(result | {"tokens_per_s_per_gpu": tokens} | figures))


def test_inside_and_outside() -> None:
    width = width_of(Quantity.TIME, ()).log
    near, far = (predicted(a_case(), 1000 * math.exp(share * width)) for share in (0.99, 1.01))
    assert [each.inside for each in judged_runs([near, far])] == [True, False]


def test_a_source_is_held_out_of_its_own_interval() -> None:
    for source in ("IBM-fms", "someone"):
        (judged,) = judged_runs([predicted(a_case(source=source))])
        assert judged.width == width_of(Quantity.TIME, (), without=source)


def test_what_a_run_leaves_open_widens_its_interval() -> None:
    several = predicted(a_case(gpus=16, network=Network.NOT_STATED))
    retried = predicted(a_case(), alloc_retries_per_step=3.0)
    assert [each.width.because for each in judged_runs([several, retried])] == [
        (Unknown.NETWORK,),
        (Unknown.MEMORY,),
    ]
    assert not judged_runs([predicted(a_case(open=True))])


def test_memory_is_judged_too() -> None:
    case = a_case(published={Figure.TOKENS: 1000.0, Figure.RESERVED: 40.0})
    (_, memory) = judged_runs([predicted(case, peak_memory_bytes={"reserved": 40.5e9})])
    assert memory.inside
    (_, memory) = judged_runs([predicted(case, peak_memory_bytes={"reserved": 60e9})])
    assert not memory.inside


def test_in_sample_and_held_out_stand_apart() -> None:
    fitted = predicted(a_case("one", "llm-foundry"), 980.0)
    other = predicted(a_case("two", "IBM-fms"), 900.0)
    judged = judged_runs([fitted, other])
    groups = {(g.by, g.name, g.fitted): g for g in groups_of(judged)}
    assert groups["source", "llm-foundry", True].mean == pytest.approx(1000 / 980 - 1)
    assert groups["source", "IBM-fms", False].bias == pytest.approx(1000 / 900 - 1)
    assert groups["chip", "a100-80gb", False].worst == groups["source", "IBM-fms", False].worst
    bars = {bar.name: bar.met for bar in interval_bars(judged)}
    assert bars["held-out sources, mean error"] is False
    assert bars["step times inside their interval, source held out"] is False


def test_bars_are_met_by_right_predictions() -> None:
    judged = judged_runs([predicted(a_case(str(place)), 1000.0) for place in range(3)])
    met = {bar.name: bar.met for bar in interval_bars(judged)}
    # The half width is the packaged table's, whatever the runs.
    assert met.pop("median half width, known software") is (judged[0].half_width <= HALF_WIDTH)
    assert len(met) == 3
    assert all(met.values())


def test_it_is_told_as_table_page_and_json(tmp_path: Path) -> None:
    predictions = [predicted(a_case("one", "llm-foundry")), predicted(a_case("two"), 700.0)]
    predictions.append(Prediction(a_case("three", ran_out=True, published={}), Result(status=Status.OOM)))
    judged = judged_runs(predictions)
    text = as_markdown(predictions, [], judged=judged)
    assert "In sample: constants were fitted to these sources." in text
    assert "| source | someone | 1 | 42.9% | 42.9% | +42.9% | 0 of 1 |" in text
    assert "700.0 | step time +42.9% | 6" in text
    assert ", outside |" in text
    assert "| someone | three | eager | out of memory | oom |" in text
    record = as_dict(predictions, [], judged=judged)
    assert [g["name"] for g in record["groups"] if g["by"] == "source"] == ["someone", "llm-foundry"]
    assert record["cases"][1]["figures"][0]["inside"] is False
    write_page(tmp_path / "page.html", predictions, [], (), judged)
    assert "Held out" in (tmp_path / "page.html").read_text()


def test_a_run_is_predicted_without_what_is_known_of_it(tmp_path: Path) -> None:
    stated = a_case("net", hardware=str(tmp_path / "n.toml"), chip="a100-80gb", network=Network.STATED)
    (tmp_path / "n.toml").write_text('base = "a100-80gb"\nname = "n"\n[nic]\ngb_s_per_node = 50\n')
    old = a_case("old", system="torch-fsdp1-1.13")
    cases = [stated, old]
    assert under(Condition.KNOWN, cases, [], tmp_path) == cases
    (network,) = under(Condition.NETWORK, cases, [], tmp_path)
    assert network.hardware == "a100-80gb"
    (software,) = under(Condition.SOFTWARE, cases, [], tmp_path)
    assert (software.name, software.system) == ("old", "torch-fsdp1")
    (system,) = under(Condition.SYSTEM, cases, [], tmp_path)
    assert (system.name, system.system) == ("net", "torch-fsdp2")
    assert len(under(Condition.CHIP, cases, [], tmp_path)) == 2


def test_a_prediction_becomes_a_residual() -> None:
    case = a_case(published={Figure.TOKENS: 1000.0, Figure.ALLOCATED: 40.0, Figure.RETRIES: 3.0})
    prediction = predicted(case, 900.0, peak_memory_bytes={"allocated": 41e9, "reserved": 50e9})
    time, memory = residuals_of(Condition.KNOWN, [prediction])
    assert (time.quantity, memory.quantity) == (Quantity.TIME, Quantity.ALLOCATED)
    assert time.log_ratio == pytest.approx(math.log(900 / 1000))  # the run was faster
    assert memory.log_ratio == pytest.approx(math.log(40 / 41))
    assert (time.family, time.nodes, time.fitted) == ("gpt", 1, False)
    assert time.full == pytest.approx(50e9 / (76.27 * 2**30), rel=0.02)
