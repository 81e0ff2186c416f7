"""Published runs: read, turned into configurations, judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.lab.validation.coverage import judge
from fsdpbench.lab.validation.paper_network import Prediction, config_of
from fsdpbench.lab.validation.runs.case import Case, Figure, known_cases
from fsdpbench.lab.validation.runs.runs_file import COLUMNS, cases_of_file
from fsdpbench.lab.validation.text import as_dict, as_markdown, write_page
from fsdpbench.reports.result import Result, Status

ROW = {
    "source": "someone", "layers": "24", "d_model": "2048", "heads": "16", "vocab": "50368", "seq": "2048",
    "gpu": "a100_80gb", "gpus": "8", "microbatch": "12", "grad_accum": "3", "param_dtype": "bfloat16",
    "reduce_dtype": "float32", "strategy": "FULL_SHARD", "activation_checkpointing": "none",
    "tokens_per_s_per_gpu": "15400",
}  # fmt: skip


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    lines = [",".join(COLUMNS), *(",".join(row[name] for name in COLUMNS) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def predicted(case: Case, **figures: Any) -> Prediction:
    return Prediction(case, Result.of({"status": "ok", "alloc_retries_per_step": 0, **figures}))


def a_case(tokens: float = 1000.0, group: str = "g") -> Case:
    return Case("c", group, "s", "gpt", "a100-80gb", 8, {}, {Figure.TOKENS: tokens})


def test_the_papers_cases_are_runnable_configurations() -> None:
    cases = known_cases("gpt")
    assert len(cases) == 13
    config = config_of(cases[0], "torch-fsdp1")
    assert (config.gpus, config.gpus_per_node, config.hardware) == (128, 8, "a100-80gb-roce2000")
    assert config.settings.activation_checkpointing == "full"
    assert config.shape["attention"] == "explicit"
    assert sum(case.collapsed for case in cases) == 1


def test_a_row_becomes_its_configuration(tmp_path: Path) -> None:
    (case,) = cases_of_file(write_rows(tmp_path / "runs.csv", ROW))
    config = config_of(case, "torch-fsdp1")
    assert config.settings.batch == 12
    assert config.settings.grad_accum == 3
    assert config.settings.param_dtype == "bf16"
    assert config.settings.reduce_dtype == "fp32"
    assert config.shape["tied"] is True
    assert case.published == {Figure.TOKENS: 15400.0}


@pytest.mark.parametrize(
    ("gpu", "system"),
    [
        ("a100_40gb", "llm-foundry-0.1"),
        ("a100_80gb", "llm-foundry-0.1"),
        ("h100_80gb", "llm-foundry-0.4"),
    ],
)
def test_a_row_of_llm_foundry_has_the_software_of_its_table(tmp_path: Path, gpu: str, system: str) -> None:
    (case,) = cases_of_file(write_rows(tmp_path / "runs.csv", {**ROW, "source": "llm-foundry", "gpu": gpu}))
    config = config_of(case)
    assert (case.system, config.system) == (system, system)
    assert config.shape["bias"] is False
    assert config.settings.reduce_dtype == "bf16"  # its DEFAULT gives FSDP none
    assert config.settings.backward_prefetch == "post"


@pytest.mark.parametrize(
    ("change", "told"), [({"gpus": "many"}, "line 2: gpus is 'many'"), ({"gpu": "a900"}, "a900")]
)
def test_bad_rows_are_named(tmp_path: Path, change: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        cases_of_file(write_rows(tmp_path / "runs.csv", {**ROW, **change}))


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="lacks the columns source"):
        cases_of_file(path)


def test_the_error_of_a_speed_is_that_of_its_step_time() -> None:
    slow = predicted(a_case(tokens=1000.0), tokens_per_s_per_gpu=800.0)
    assert slow.step_time_error == pytest.approx(0.25)
    assert predicted(a_case(), tokens_per_s_per_gpu=None).step_time_error is None


def test_bars_are_met_and_missed() -> None:
    good = [predicted(a_case(), tokens_per_s_per_gpu=speed) for speed in (990.0, 1020.0)]
    assert all(bar.met for bar in judge(good))
    bad = [*good, predicted(a_case(), tokens_per_s_per_gpu=700.0)]
    assert {bar.name: bar.met for bar in judge(bad)} == {
        "step time, mean error": False,
        "step time, worst error": False,
    }
    unfinished = [*good, Prediction(a_case(), Result(status=Status.OOM))]
    assert not all(bar.met for bar in judge(unfinished))


def paper_predictions(**changes: Any) -> list[Prediction]:
    """Every published figure predicted to the digit, except the changes by case name."""
    predictions = []
    for case in known_cases("gpt"):
        memory = {
            figure.path[1]: value * figure.unit
            for figure, value in case.published.items()
            if not figure.is_speed
        }
        result = {
            "hardware_tflops_per_gpu": case.published[Figure.HARDWARE_TFLOPS],
            "peak_memory_bytes": memory or None,
            "alloc_retries_per_step": 12 if case.collapsed else 0,
        }
        predictions.append(predicted(case, **{**result, **changes.get(case.name, {})}))
    return predictions


def test_the_papers_own_figures_meet_every_bar() -> None:
    bars = judge(paper_predictions())
    assert len(bars) == 7
    assert all(bar.met for bar in bars)


@pytest.mark.parametrize(
    ("name", "change", "missed"),
    [
        ("GPT-175B, 512 GPUs, batch 2", {"hardware_tflops_per_gpu": 170.0}, "plateau"),
        ("GPT-175B, 128 GPUs, batch 2", {"alloc_retries_per_step": 0}, "collapse"),
        ("GPT-175B, 128 GPUs, batch 2", {"hardware_tflops_per_gpu": 180.0}, "collapse"),
        (
            "GPT-175B, 256 GPUs, batch 1, no backward prefetch",
            {"hardware_tflops_per_gpu": 150.0},
            "gain of backward prefetch",
        ),
        ("GPT-175B, 192 GPUs, batch 1", {"peak_memory_bytes": {"allocated": 43e9}}, "GB allocated"),
    ],
)
def test_each_bar_of_the_paper_can_be_missed(name: str, change: dict[str, Any], missed: str) -> None:
    bars = judge(paper_predictions(**{name: change}))
    assert any(missed in bar.name for bar in bars if not bar.met)


def test_it_is_told_as_table_page_and_json(tmp_path: Path) -> None:
    predictions = paper_predictions()
    bars = judge(predictions)
    text = as_markdown(predictions, bars)
    row = "| GPT-175B, 512 GPUs, batch 2 | eager | TFLOPS/GPU (with recompute) | 184.7 | 184.7 | step time"
    assert row in text
    assert len(as_dict(predictions, bars)["cases"]) == 13
    write_page(tmp_path / "page.html", predictions, bars)
    page = (tmp_path / "page.html").read_text()
    assert "Simulated against published" in page
    assert "GPT-175B, 512 GPUs, batch 2" in page
