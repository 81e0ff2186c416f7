"""How a model's code is written, clipping, checkpoints of the first blocks: what they do to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpbench.systems.training import clip_gradients

SIM = ("--device", "sim", "--gpus", "8", "--system")


def result_of(fsdpbench: Any, folder: Path, *words: str) -> dict[str, Any]:
    result: dict[str, Any] = fsdpbench.json("run", "--json", "-o", str(folder), *words)
    assert result["status"] == "ok", result["cause"]
    return result


def words(settings: str) -> list[str]:
    return [word for setting in settings.split() for word in ("--set", setting)]


@pytest.mark.campaign
@pytest.mark.parametrize("system", ["torch-fsdp2", "torch-fsdp1", "impl-fsdp2", "impl-fsdp1", "torch-ddp"])
def test_all_ways_train_alike_on_two_ranks(fsdpbench: Any, tmp_path: Path, system: str) -> None:
    """Losses of eight steps, with a norm that clips each of them, are those of the plain code."""
    plain, clipped = "param_dtype=fp32 batch=2", "clip=0.05"
    ways = ["", clipped, f"{clipped} loss=chunked checkpoint_first=2 activation_checkpointing=full"]
    ways.append(f"{clipped} loss=fused norm=composed")
    losses = []
    for index, way in enumerate(ways):
        told = ("--model", "llama-tiny", "--device", "cpu", "--gpus", "2", "--system", system)
        given = words(f"{plain} {way} optimizer=sgd")
        # How many steps warm up depends on how steady they are.
        losses.append(result_of(fsdpbench, tmp_path / str(index), *told, *given)["loss"][:8])
    free, reference, *others = losses
    for each in others:
        assert each == pytest.approx(reference, rel=1e-5)
    assert free[-1] != pytest.approx(reference[-1], rel=1e-5)


@pytest.mark.campaign
def test_experts_on_another_mesh_are_clipped_with_the_rest(fsdpbench: Any, tmp_path: Path) -> None:
    losses = []
    for index, way in enumerate(("ep=1", "ep=2", "ep=2 clip=0.05", "ep=1 clip=0.05")):
        told = ("--model", "moe-tiny", "--device", "cpu", "--gpus", "2", "--system", "impl-fsdp2")
        given = words(f"param_dtype=fp32 batch=2 optimizer=sgd {way}")
        losses.append(result_of(fsdpbench, tmp_path / str(index), *told, *given)["loss"][:8])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[3], rel=1e-5)
    assert losses[2][-1] != pytest.approx(losses[1][-1], rel=1e-6)


@pytest.mark.plain_cases("impl-fsdp1")
@pytest.mark.parametrize("system", ["torch-fsdp2", "torch-fsdp1", "impl-fsdp2", "impl-fsdp1"])
def test_what_they_cost(fsdpbench: Any, tmp_path: Path, system: str) -> None:
    """Clipping adds an all-reduce, chunks recompute the head, two of four blocks half of all blocks."""
    figures = {}
    ways = ("", "clip=1", "loss=chunked", "loss=fused", "activation_checkpointing=full",
            "activation_checkpointing=full checkpoint_first=2")  # fmt: skip
    for index, way in enumerate(ways):
        told = ("--model", "llama-tiny", *SIM, system, *words(way))
        figures[way] = result_of(fsdpbench, tmp_path / str(index), *told)
    plain = figures[""]

    def reduced(result: dict[str, Any]) -> int:
        found = result["communication"].get("all_reduce")
        return 0 if found is None else int(found["count"])

    assert reduced(figures["clip=1"]) > reduced(plain)
    tflop = {
        way: result["hardware_tflops_per_gpu"] * result["step_time_s"] for way, result in figures.items()
    }
    assert tflop["loss=fused"] == pytest.approx(tflop[""])
    assert tflop["loss=chunked"] > tflop[""]
    first, full = (tflop[way] for way in reversed(ways[-2:]))
    assert first - tflop[""] == pytest.approx((full - tflop[""]) / 2)


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ("gpt-tiny", "norm=composed", "one way to write it"),
        ("gpt-tiny", "checkpoint_first=2", "activation_checkpointing, which is off"),
        ("regnet-tiny", "loss=fused", "no loss of tokens"),
        ("llama-tiny", "loss=fused tp=2", "of which tp gives each rank a part"),
        ("llama-tiny", "loss=chunked compile=true compile_loss=true", "leave compile_loss out"),
    ],
)
def test_what_has_no_meaning_is_refused(fsdpbench: Any, model: str, settings: str, named: str) -> None:
    done = fsdpbench("run", "--model", model, *SIM, "impl-fsdp2", *words(settings))
    assert done.stdout.startswith("not_applicable")
    assert named in " ".join(done.stdout.split())


@pytest.mark.parametrize("given", ["clip=0", "clip=-1", "clip=nan", "checkpoint_first=0", "loss=liger"])
def test_what_is_no_value_is_refused(fsdpbench: Any, given: str) -> None:
    done = fsdpbench("run", "--model", "gpt-tiny", "--device", "sim", "--set", given)
    assert done.returncode == 2
    assert given.partition("=")[0] in done.stderr


def test_without_gradients_there_is_nothing_to_clip() -> None:
    """As torch's own function has it."""
    assert clip_gradients([torch.nn.Parameter(torch.zeros(3))], 1.0) == 0
