"""Settings of one step, by what they do to collectives and memory: the last unit kept, optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def result_of(fsdpbench: Any, folder: Path, *words: str) -> dict[str, Any]:
    result: dict[str, Any] = fsdpbench.json("run", "--model", "gpt-tiny", "--json", "-o", str(folder), *words)
    return result


def count(result: dict[str, Any], kind: str) -> int:
    """Collectives of that kind a step."""
    found = result["communication"].get(kind)
    return 0 if found is None else int(found["count"])


SIM = ("--device", "sim", "--gpus", "8", "--system")


@pytest.mark.plain_cases("torch-fsdp2", "impl-fsdp1")
@pytest.mark.parametrize("system", ["torch-fsdp1", "torch-fsdp2", "impl-fsdp1", "impl-fsdp2"])
def test_the_last_unit_is_gathered_once(fsdpbench: Any, tmp_path: Path, system: str) -> None:
    resharded = result_of(fsdpbench, tmp_path / "a", *SIM, system)
    kept = result_of(fsdpbench, tmp_path / "b", *SIM, system, "--set", "keep_last_unsharded=true")
    assert count(kept, "all_gather") == count(resharded, "all_gather") - 1


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize("system", ["torch-fsdp2", "impl-fsdp2"])
def test_units_that_stay_gathered_are_gathered_once(fsdpbench: Any, tmp_path: Path, system: str) -> None:
    model = ("--shape", "layers=4")
    resharded = result_of(fsdpbench, tmp_path / "a", *SIM, system, *model)
    mixed = (
        "--set",
        "reshard_after_forward=true:1+false:3",
        "--set",
        "activation_checkpointing=full:3+none:1",
    )
    kept = result_of(fsdpbench, tmp_path / "b", *SIM, system, *model, *mixed)
    assert count(kept, "all_gather") == count(resharded, "all_gather") - 3
    assert kept["config"]["settings"]["reshard_after_forward"] == "true:1+false:3"


@pytest.mark.campaign
@pytest.mark.parametrize("system", ["torch-fsdp2", "impl-fsdp2"])
def test_losses_on_cpu_ranks_are_those_of_uniform_settings(
    fsdpbench: Any, tmp_path: Path, system: str
) -> None:
    words = (
        "--device",
        "cpu",
        "--gpus",
        "2",
        "--system",
        system,
        "--shape",
        "layers=4",
        "--param-dtype",
        "fp32",
    )
    mixed = (
        "--set",
        "reshard_after_forward=true:3+false:1",
        "--set",
        "activation_checkpointing=full:1+op:2+none:1",
        "--set",
        "activation_offload=true:1+false:1+true:2",
    )
    uniform = result_of(fsdpbench, tmp_path / "a", *words)
    by_unit = result_of(fsdpbench, tmp_path / "b", *words, *mixed)
    both = [result["loss"] for result in (uniform, by_unit)]
    steps = min(map(len, both))  # a warm-up may take more steps than another one
    assert steps > 3
    assert None not in both[0]
    assert both[0][:steps] == both[1][:steps]


def test_muon_moves_each_matrix_there_and_back(fsdpbench: Any, tmp_path: Path) -> None:
    """16 matrices on 8 ranks: two batches, each there and back; the vectors' AdamW communicates nothing."""
    plain = result_of(fsdpbench, tmp_path / "a", *SIM, "impl-fsdp2")
    muon = result_of(fsdpbench, tmp_path / "b", *SIM, "impl-fsdp2", "--set", "optimizer=muon")
    assert count(muon, "all_to_all") == 4
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert count(muon, kind) == count(plain, kind)


@pytest.mark.campaign
def test_two_byte_moments_save_four_bytes_a_parameter(fsdpbench: Any, tmp_path: Path) -> None:
    sizes = ("--device", "sim", "--gpus", "64", "--model", "gpt-2.8b", "--set", "batch=1")
    held = []
    for dtype in ("auto", "bf16"):
        told = ("--system", "impl-fsdp2", *sizes, "--set", f"optimizer_dtype={dtype}")
        result = result_of(fsdpbench, tmp_path / dtype, *told)
        held.append(result["peak_memory_bytes"]["allocated"])
    parameters = 2.78e9 / 64
    assert 3.5 * parameters < held[0] - held[1] < 4.5 * parameters


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("keep_last_unsharded=true wrap=root", "no units below the root"),
        ("reshard_after_forward=true:9+false:1", "it names 10, and gpt-tiny has 4"),
        ("reshard_after_forward=true:1+false:1 wrap=root", "use block or every-K"),
        ("reshard_after_forward=true:3+false:1 keep_last_unsharded=true", "leave it out"),
        ("activation_checkpointing=full:1+none:2", "it names 3, and gpt-tiny has 4"),
        ("activation_offload=true:1+false:2", "it names 3, and gpt-tiny has 4"),
        ("activation_checkpointing=full:1+none:3 checkpoint_first=1", "leave it out"),
        ("keep_last_unsharded=true strategy=SHARD_GRAD_OP", "already"),
        ("optimizer_dtype=bf16 optimizer=sgd", "AdamW"),
        ("optimizer=muon cpu_offload=true", "Muon"),
    ],
)
def test_what_changes_nothing_or_cannot_be_is_refused(fsdpbench: Any, settings: str, named: str) -> None:
    words = [word for setting in settings.split() for word in ("--set", setting)]
    done = fsdpbench("run", "--model", "gpt-tiny", *SIM, "impl-fsdp2", *words)
    assert done.stdout.startswith("not_applicable")
    assert named in done.stdout


def test_flat_parameters_have_no_matrices(fsdpbench: Any) -> None:
    done = fsdpbench("run", "--model", "gpt-tiny", *SIM, "torch-fsdp1", "--set", "optimizer=muon")
    assert done.stdout.startswith("not_applicable")
    assert "use FSDP2" in done.stdout
