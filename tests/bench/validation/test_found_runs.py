"""Published runs as they were found: which become cases, with what their words say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.lab.validation.paper_network import config_of
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.lab.validation.runs.runs_file import cases_of_file

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ci"))
from found_runs import COLUMNS, convert

ROW = {
    "id": "mn1", "source": "org/study:docs/a.md row 1", "model": "GPT 2.7B", "layers": "2", "d_model": "256",
    "d_ff": "1024", "heads": "4", "kv_heads": "4", "vocab": "512", "gpu": "h100-64gb-mn5", "gpus": "64",
    "gpus_per_node": "4", "seq": "4096", "microbatch": "2", "grad_accum": "1", "strategy": "fsdp1 FULL_SHARD",
    "ac": "none", "dtype": "bf16", "compile": "0", "metric": "tokens_per_s_per_gpu", "value": "1000",
    "notes": "param, reduce and buffer dtype bf16",
}  # fmt: skip


def cases(folder: Path, **changes: str) -> list[Case]:
    found, row = folder / "found.csv", ROW | changes
    values = ",".join(f'"{row[name]}"' for name in COLUMNS)
    found.write_text(",".join(COLUMNS) + "\n" + values + "\n")
    left_out = convert(found, folder / "runs.csv")
    cases = cases_of_file(folder / "runs.csv")
    assert left_out == 1 - len(cases)
    return cases


def test_a_row_becomes_its_configuration(tmp_path: Path) -> None:
    (case,) = cases(tmp_path)
    config = config_of(case)
    assert (case.source, case.chip, case.network) == ("org/study", "h100-64gb", Network.STATED)
    assert (config.system, config.gpus, config.gpus_per_node) == ("torch-fsdp1", 64, 4)
    assert (config.shape["d_model"], config.shape["vocab"]) == (256, 512)
    assert (config.settings.strategy, config.settings.reduce_dtype) == ("FULL_SHARD", "bf16")
    assert case.published == {Figure.TOKENS: 1000.0}


@pytest.mark.parametrize(
    ("changes", "setting", "wanted"),
    [
        ({"strategy": "hybrid (fsdp1 HYBRID_SHARD, node of 4)"}, "strategy", "HYBRID_SHARD"),
        ({"strategy": "fsdp2 (zero2)"}, "strategy", "SHARD_GRAD_OP"),
        ({"notes": "reduction not stated"}, "reduce_dtype", "fp32"),
        ({"compile": "1"}, "compile", True),
        ({"ac": "op"}, "activation_checkpointing", "op"),
    ],
)
def test_words_become_settings(
    tmp_path: Path, changes: dict[str, str], setting: str, wanted: str | bool
) -> None:
    (case,) = cases(tmp_path, **changes)
    assert getattr(config_of(case).settings, setting) == wanted


@pytest.mark.parametrize(
    ("source", "software"),
    [
        ("org/study:docs/a.md (2024-09; also README)", "torch-2.10"),
        ("org/study:PR 2 (2024-08), pjnl-20240814", "thunder-2024"),
        ("org/study:PR 1 (2025-10..2026-04)", None),
        ("org/study:docs/a.md", None),
    ],
)
def test_the_month_of_a_source_chooses_the_kernels(tmp_path: Path, source: str, software: str | None) -> None:
    (case,) = cases(tmp_path, source=source)
    assert config_of(case).software == software


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"metric": "tokens_per_s_total", "value": "64000"}, 1000.0),
        ({"metric": "step_s", "value": "2"}, 4096.0),
    ],
)
def test_every_figure_of_time_is_a_speed(tmp_path: Path, changes: dict[str, str], tokens: float) -> None:
    (case,) = cases(tmp_path, **changes)
    assert case.published[Figure.TOKENS] == tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "peak_GiB"},
        {"strategy": "fsdp2 4 x TP 2"},
        {"strategy": "fsdp2 (SimpleFSDP graph)"},
        {"notes": "activation offload on"},
        {"model": "Llama-style MoE 8 experts"},
        {"model": "Qwen3-8B"},
        {"dtype": "fp8"},
        {"grad_accum": "8"},
    ],
)
def test_other_kinds_are_left_out(tmp_path: Path, changes: dict[str, str]) -> None:
    assert cases(tmp_path, **changes) == []


def test_a_wrong_number_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 2: value is 'fast', not a number above 0"):
        cases(tmp_path, value="fast")
