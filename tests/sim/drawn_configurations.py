"""Small configurations of simulated GPUs, drawn at random, and what a run of one writes.

As a program (`FOLDER SEED COUNT [compiled]`): runs `COUNT` of them, each in a fork and a folder of its own.
"""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path
from typing import Any

import torch
from device_training import in_new_process

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Settings
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.worker import run_rank
from fsdpbench.sim import preload
from fsdpbench.sweep.planning import make_config, make_target, without_absent
from fsdpbench.systems import get_system


def configuration(system: str, **settings: Any) -> Config:
    """A small one of eight simulated GPUs; `model` is among `settings`."""
    model = settings.pop("model", "gpt-tiny")
    where: dict[str, Any] = {"device": "sim", "hardware": "a100-80gb", "gpus": 8, "gpus_per_node": 4}
    target = make_target(model=model, shape={}, data=None, **where)
    return without_absent(make_config(target, system, Settings.of(**settings), target.workload()))


def files_of(config: Config, folder: Path) -> dict[str, bytes]:
    """The record and the trace of a run in a process of its own."""

    def run() -> None:
        with contextlib.suppress(Exception):  # it is in the record
            run_rank(config, Placement(0, config.gpus, 0), folder)

    in_new_process(run)
    return {path.name: path.read_bytes() for path in folder.rglob("rank0_*")}


VALUES: dict[str, tuple[Any, ...]] = {
    "strategy": ("SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"), "wrap": ("every-2", "root"), "batch": (2, 4),
    "backward_prefetch": ("post", "none"), "forward_prefetch": (1, 2), "limit_all_gathers": ("off", 1),
    "memory_handover": ("record_stream", "events"), "activation_checkpointing": ("op", "full"),
    "cpu_offload": (True,), "activation_offload": (True,), "optimizer": ("adamw-foreach", "sgd", "muon"),
    "linear_dtype": ("fp8",), "grad_accum": (2,), "clip": (1.0,), "lora": (8,), "zero_grad": ("fill",),
    "tp": (2,), "cp": (2,), "ep": (2,), "layout": ("grouped", "packed"), "symmetric_memory": (True,),
}  # fmt: skip
MORE_VALUES: dict[str, tuple[Any, ...]] = VALUES | {
    "strategy": ("SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"), "shard_size": (2,),
    "reshard_after_forward": ("true", "false", 2), "keep_last_unsharded": (True,), "reduce_dtype": ("bf16",),
    "param_dtype": ("fp16", "fp32"), "checkpoint_first": (2,), "optimizer_dtype": ("bf16",),
    "linear_dtype": ("fp8", "mxfp8", "nvfp4"), "lora_base": ("4bit",), "attention": ("flex", "math"),
    "loss": ("fp32", "lean", "chunked", "fused"), "rotary": ("complex", "matrices"), "norm": ("composed",),
    "graph": ("step",), "grad_sync": ("last",),
}  # fmt: skip
SYSTEMS = ("impl-fsdp1", "impl-fsdp2", "torch-fsdp1", "torch-fsdp2", "torch-ddp")
MODELS = ("gpt-tiny", "t5-tiny", "llama-tiny", "moe-tiny", "regnet-tiny")
MORE_MODELS = (*MODELS, "decoder-tiny", "deepvit-tiny", "dhen-tiny")


def drawn(
    numbers: random.Random,
    values: dict[str, tuple[Any, ...]] = VALUES,
    models: tuple[str, ...] = MODELS,
    **fixed: Any,
) -> Config:
    """A random configuration that its system can have: up to four settings are not at their default."""
    while True:
        names = numbers.sample(sorted(values), numbers.randint(0, 4))
        settings = {name: numbers.choice(values[name]) for name in names} | fixed
        with contextlib.suppress(Exception):  # impossible together
            config = configuration(numbers.choice(SYSTEMS), model=numbers.choice(models), **settings)
            if not get_system(config.system).not_applicable(config):
                return config


def run_drawn(folder: Path, seed: int, count: int, **fixed: Any) -> None:
    """Run `count` random configurations, and write what each does into a folder of its own."""
    torch.set_num_threads(1)
    preload()
    numbers = random.Random(seed)
    for at in range(count):
        config = drawn(numbers, MORE_VALUES, MORE_MODELS, **fixed)
        place = folder / f"{at} {config.name}"
        place.mkdir(parents=True)
        files_of(config, place)


if __name__ == "__main__":
    asked = {"compile": True} if sys.argv[4:] == ["compiled"] else {}
    run_drawn(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), **asked)
