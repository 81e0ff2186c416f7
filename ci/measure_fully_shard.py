"""Step time and memory of `impl-fsdp2` beside torch's `fully_shard` on simulated GPUs.

    python ci/measure_fully_shard.py [--only TEXT] [--time 540]

The configurations of the default sweep that both have, small and large worlds, and GPT-175B on 128 and 512.
Time of impl-fsdp2 also with twice the share that a further member of a group of collectives takes
(`sim/torch_device/distributed/communicator.py`; estimated). "retries": of the allocator, in timed steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

GIB = 2**30
COMMON: dict[str, Any] = {"model": "gpt-2.8b", "gpus": 8, "hardware": "a100-80gb"}
CASES: dict[str, dict[str, Any]] = {
    "default sweep: block, fp32 reduced": {},
    "default sweep: block, bf16 reduced": {"reduce_dtype": "bf16"},
    "default sweep: every-4, fp32 reduced": {"wrap": "every-4"},
    "default sweep: every-4, bf16 reduced": {"wrap": "every-4", "reduce_dtype": "bf16"},
    "gpt-2.8b, 64, batch 2": {"gpus": 64, "batch": 2},
    "gpt-2.8b, 64, batch 1, bf16 reduced": {"gpus": 64, "batch": 1, "reduce_dtype": "bf16"},
    "gpt-2.8b, 8, kept after forward": {"strategy": "SHARD_GRAD_OP"},
    "gpt-2.8b, 64, hybrid, batch 2": {"gpus": 64, "batch": 2, "strategy": "HYBRID_SHARD"},
    "gpt-tiny, 8": {"model": "gpt-tiny"},
    "llama3-8b, 16, batch 1": {"model": "llama3-8b", "gpus": 16, "batch": 1},
    "gpt-175b, 128": {"model": "gpt-175b", "gpus": 128, "batch": 1, "activation_checkpointing": "full"},
    "gpt-175b, 512": {"model": "gpt-175b", "gpus": 512, "batch": 1, "activation_checkpointing": "full"},
}


@dataclass(frozen=True)
class Found:
    """The figures of one configuration: seconds, bytes, and retries of the allocator."""

    step_s: float
    allocated: int
    reserved: int
    retries: int


def measure(system: str, words: dict[str, Any], doubled: bool) -> Found:
    """Simulate one configuration in this process, without a trace."""
    import json

    from fsdpbench.base.configuration.config import Config, Measurement
    from fsdpbench.base.settings import Settings
    from fsdpbench.engine.devices.base import Placement
    from fsdpbench.engine.results.records import record_path
    from fsdpbench.engine.worker import run_rank
    from fsdpbench.sim import simulation
    from fsdpbench.sim.torch_device.distributed import communicator
    from fsdpbench.workloads import get_workload

    simulation.preload()
    if doubled:
        communicator.MEMBER_NS *= 2
        communicator.MEMBER_CPU_NS *= 2
    settings = COMMON | words
    model, gpus, hardware = (settings.pop(name) for name in ("model", "gpus", "hardware"))
    workload = get_workload(model)
    config = Config(
        model=model,
        shape=dict(workload.shape),
        system=system,
        device="sim",
        hardware=hardware,
        gpus=gpus,
        gpus_per_node=8,
        settings=Settings.of(**settings).changed(seq=workload.resolve_seq(None)),
        measurement=Measurement(2, 1, 0, timeout_s=300.0, most_warmup_steps=6),
    )
    with tempfile.TemporaryDirectory() as folder:
        run_rank(config, Placement(rank=0, world_size=gpus, local_rank=0), Path(folder))
        record = json.loads(record_path(Path(folder), 0).read_text())
    peaks = record["memory_per_step"]
    most = {name: max(step[name] for step in peaks) for name in ("allocated", "reserved")}
    retries = sum(step["alloc_retries"] for step in peaks)
    return Found(median(record["step_times_s"]), most["allocated"], most["reserved"], retries)


def show(name: str, found: dict[str, Found]) -> str:
    """One line: impl, doubled, torch, and whether the bars hold."""
    impl, doubled, torchs = found["impl"], found["doubled"], found["torch"]
    text = " |".join(
        f" {f.step_s * 1e3:9.2f} {f.allocated / GIB:6.2f} {f.reserved / GIB:6.2f} {f.retries:2}"
        for f in (impl, torchs)
    )
    gain = 1 - impl.step_s / torchs.step_s
    bars = {
        "time": max(impl.step_s, doubled.step_s) <= torchs.step_s,
        "reserved": impl.reserved <= torchs.reserved,
        "allocated": impl.allocated <= torchs.allocated,
        "retries": impl.retries <= torchs.retries,
    }
    missed = ", ".join(bar for bar, holds in bars.items() if not holds) or "-"
    return f"{name:36} |{text} | {doubled.step_s * 1e3:9.2f} | {gain:6.1%} | {missed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations whose name has this")
    parser.add_argument("--time", type=float, default=float("inf"), help="start none after so many seconds")
    options = parser.parse_args()
    began = time.monotonic()
    print(
        f"{'':36} | impl-fsdp2: ms, allocated, reserved GiB, retries | torch-fsdp2 | doubled | less | missed"
    )
    for name, words in CASES.items():
        if options.only not in name or time.monotonic() - began > options.time:
            continue
        found = {}
        for side, system in (("impl", "impl-fsdp2"), ("doubled", "impl-fsdp2"), ("torch", "torch-fsdp2")):
            with get_context("spawn").Pool(1) as pool:
                found[side] = pool.apply(measure, (system, words, side == "doubled"))
        print(show(name, found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
