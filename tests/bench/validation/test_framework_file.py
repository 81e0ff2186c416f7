"""Published runs of any model and framework: read from their columns, with the network that they state."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.lab.validation.paper_network import config_of
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.lab.validation.runs.runs_file import GENERAL_COLUMNS, cases_of_file
from fsdpbench.sim.model.profile import load_profile

ROW = {
    "source": "someone", "run": "13B", "gpu": "a100-80gb", "gpus": "128", "network": "400 Gb/s a node",
    "system": "torch-fsdp1", "model": "llama2-13b",
    "shape": "layers=2,d_model=256,d_ff=512,heads=4,kv_heads=4",
    "seq": "4096", "batch": "2", "strategy": "HYBRID_SHARD", "activation_checkpointing": "every-2",
    "reduce_dtype": "bf16", "compiled": "no", "tokens_per_s_per_gpu": "1800", "status": "ok",
    "allocated_gib": "40", "reserved_gib": "",
}  # fmt: skip


def cases(folder: Path, **changes: str) -> list[Case]:
    path = folder / "runs.csv"
    row = ROW | changes
    values = (f'"{row[name]}"' for name in GENERAL_COLUMNS)
    path.write_text(",".join(GENERAL_COLUMNS) + "\n" + ",".join(values) + "\n")
    return cases_of_file(path)


def test_a_row_becomes_its_configuration(tmp_path: Path) -> None:
    (case,) = cases(tmp_path)
    config = config_of(case)
    assert (config.system, config.gpus, config.gpus_per_node) == ("torch-fsdp1", 128, 8)
    assert config.shape["d_model"] == 256
    settings = config.settings
    assert (settings.strategy, settings.activation_checkpointing) == ("HYBRID_SHARD", "every-2")
    assert (settings.batch, settings.reduce_dtype, settings.compile) == (2, "bf16", False)
    assert case.published == {Figure.TOKENS: 1800.0, Figure.ALLOCATED: pytest.approx(40 * 2**30 / 1e9)}
    assert (case.fitted, case.open, case.ran_out) == (False, False, False)


def test_a_stated_network_becomes_a_profile(tmp_path: Path) -> None:
    (case,) = cases(tmp_path)
    mine, chip = load_profile(case.hardware), load_profile("a100-80gb")
    assert mine.nic.gb_s_per_node == 50
    assert (mine.compute, mine.gemm, mine.nvlink) == (chip.compute, chip.gemm, chip.nvlink)
    assert (case.chip, case.network) == ("a100-80gb", Network.STATED)


@pytest.mark.parametrize(
    ("told", "wanted"), [("one node", Network.ONE_NODE), ("not stated", Network.NOT_STATED)]
)
def test_without_one_the_chips_own_network_is_taken(tmp_path: Path, told: str, wanted: Network) -> None:
    (case,) = cases(tmp_path, network=told)
    assert (case.hardware, case.network) == ("a100-80gb", wanted)


def test_a_run_that_was_out_of_memory_has_no_figures(tmp_path: Path) -> None:
    (case,) = cases(tmp_path, status="oom", tokens_per_s_per_gpu="")
    assert case.ran_out
    assert case.published == {}


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("gpu", "a900", "line 2: gpu is 'a900', none of"),
        ("gpus", "0", "line 2: gpus is '0', not a whole number above 0"),
        ("network", "fast", "line 2: network is 'fast', write"),
        ("system", "fsdp9", "line 2: system is 'fsdp9'"),
        ("model", "llama9", "line 2: model is 'llama9'"),
        ("shape", "layers", "line 2: shape is 'layers', write it as"),
        ("strategy", "SOME_SHARD", "line 2: strategy is 'SOME_SHARD'"),
        ("compiled", "perhaps", "line 2: compiled is 'perhaps', not one of yes, no"),
        ("status", "late", "line 2: status is 'late', not ok or oom"),
        ("tokens_per_s_per_gpu", "-3", "line 2: tokens_per_s_per_gpu is '-3', not a number above 0"),
        ("reserved_gib", "inf", "line 2: reserved_gib is 'inf', not a number above 0"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, column: str, value: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        cases(tmp_path, **{column: value})


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("source,model\na,llama2-7b\n")
    with pytest.raises(UsageError, match="lacks the columns run, gpu"):
        cases_of_file(path)
