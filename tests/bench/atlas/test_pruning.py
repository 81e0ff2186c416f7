"""What is pruned by arithmetic does not fit: the bound lies below what the simulated allocator needs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.atlas.space import BATCHES, LONGEST, Extent, cells, least_bytes
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sweep.planning import make_config, make_target, without_absent
from fsdpbench.sweep.runner import UNTRACED, simulate
from fsdpbench.sweep.trials import Progress


def a_config(model: str, hardware: str = "b300", gpus: int = 8, **settings: Any) -> Config:
    target = make_target(
        model=model,
        shape={},
        device="sim",
        hardware=hardware,
        gpus=gpus,
        gpus_per_node=None,
        data=None,
        measurement=UNTRACED,
    )
    chosen = Settings.of(**{"batch": 4, "seq": LONGEST, **settings})
    return without_absent(make_config(target, "torch-fsdp2", chosen, target.workload()))


def peak(config: Config, folder: Path) -> int:
    result = simulate([config], folder, Progress(), 1)[content_key(config)]
    assert result.status == "ok", result.cause
    return int(result.stored("peak_memory_bytes.allocated"))


_MODELS = (
    "llama-tiny",
    "gpt-2.8b",
    "mistral-7b",
    "gemma3-27b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "llama3-70b",
)


@pytest.mark.plain_cases("llama-tiny-SHARD_GRAD_OP-none")
@pytest.mark.parametrize("checkpointing", ["none", "op", "full"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@pytest.mark.parametrize("model", _MODELS)
def test_the_bound_is_below_what_is_allocated(
    model: str, strategy: str, checkpointing: str, tmp_path: Path
) -> None:
    gpus = 256 if model == "llama3-70b" else 32
    config = a_config(model, gpus=gpus, strategy=strategy, activation_checkpointing=checkpointing, batch=1)
    bound = least_bytes(config)
    assert bound is not None
    if bound > load_profile("b300").usable_memory_bytes:
        pytest.skip("too large for any chip: nothing to compare with")
    assert bound <= peak(config, tmp_path / "runs")


@pytest.mark.campaign
@pytest.mark.parametrize("hardware", ["l40s", "a100-40gb"])
def test_what_is_pruned_runs_out_of_memory(hardware: str, tmp_path: Path) -> None:
    """Every batch that arithmetic takes from a ladder, simulated all the same."""
    (cell,) = cells(Extent(("llama3-8b",), (hardware,), (8,)))
    kept = {key for walk in cell.walks for key in walk.configs}
    ways = itertools.product(("FULL_SHARD", "SHARD_GRAD_OP"), ("none", "op", "full"), BATCHES)
    tried = [
        a_config("llama3-8b", hardware, strategy=strategy, activation_checkpointing=how, batch=batch)
        for strategy, how, batch in ways
    ]
    pruned = [config for config in tried if content_key(config) not in kept]
    assert len(pruned) == cell.pruned > 0
    results = simulate(pruned, tmp_path / "runs", Progress())
    assert {results[content_key(config)].status for config in pruned} == {"oom"}


def test_what_is_not_understood_has_no_bound() -> None:
    assert least_bytes(a_config("llama-tiny", cpu_offload=True)) is None
    assert least_bytes(a_config("llama-tiny", lora=4, param_dtype="bf16")) is None
