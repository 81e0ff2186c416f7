"""Runs a small sweep on simulated GPUs once as it is, and once with each regression planted in the code.

    python planted_sweeps.py FOLDER        leaves FOLDER/<variant>, a sweep's folder each

One process imports torch; each configuration then runs in a fork of it, into which a regression is patched
first. What is compared is therefore what the code did, under an unchanged configuration.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.measuring.soak import TrainingLoop
from fsdpbench.engine.results.store import Store, point_folder_name
from fsdpbench.impl.collectives import comm
from fsdpbench.impl.runtime import schedule
from fsdpbench.launch.point import run_point
from fsdpbench.sim import preload
from fsdpbench.sweep.planning import make_config, make_target, without_absent

BASE = "base"
LAYERS = 4
_SLOWER_KERNELS = """\
base = "a100-80gb"
[gemm]
sustained = {sustained}
"""


def configurations() -> list[Config]:
    target = make_target(
        model="gpt-125m",
        shape={"layers": LAYERS},
        device="sim",
        hardware="a100-80gb",
        gpus=8,
        gpus_per_node=None,
        data=None,
        measurement=Measurement.default_for("sim"),
    )
    workload = target.workload()
    settings = Settings.of(batch=2, seq=1024, limit_all_gathers=2, wrap="block")
    systems = ("impl-fsdp1", "impl-fsdp2")
    return [without_absent(make_config(target, system, settings, workload)) for system in systems]


def replaced(owner: Any, name: str, new: Callable[[Any], Any]) -> None:
    """Replace `owner.name`, which must exist, by `new(old)`."""
    setattr(owner, name, new(getattr(owner, name)))


def no_prefetch(config: Config, work: Path, base: Path) -> Config:
    replaced(schedule.Schedule, "_prefetch_backward", lambda _: lambda self, stage: None)
    return config


def no_limiter(config: Config, work: Path, base: Path) -> Config:
    replaced(schedule.RateLimiter, "wait", lambda _: lambda self, unit: None)
    return config


def another_all_gather(config: Config, work: Path, base: Path) -> Config:
    def twice(all_gather: Callable[..., Any]) -> Callable[..., Any]:
        def gather(*arguments: Any) -> Any:
            all_gather(*arguments)
            return all_gather(*arguments)

        return gather

    replaced(comm, "all_gather", twice)
    replaced(comm, "all_gather_grouped", twice)
    return config


def another_copy(config: Config, work: Path, base: Path) -> Config:
    def copying(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
        return lambda output, source, *rest, **more: reduce_scatter(output, source.clone(), *rest, **more)

    def copying_one(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
        return lambda outputs, inputs, *rest: reduce_scatter(
            outputs, [*inputs[:-1], inputs[-1].clone()], *rest
        )

    replaced(comm, "reduce_scatter", copying)
    replaced(comm, "reduce_scatter_grouped", copying_one)
    return config


def slower_kernels(config: Config, work: Path, base: Path) -> Config:
    """Matrix multiplications 3 % slower."""
    from fsdpbench.sim.model.profile import load_profile

    profile = work / "slower.toml"
    profile.write_text(_SLOWER_KERNELS.format(sustained=load_profile("a100-80gb").gemm.sustained / 1.03))
    return replace(config, hardware=str(profile))


def more_memory(config: Config, work: Path, base: Path) -> Config:
    """5 % of the peak, held from the first step on."""
    result = base / point_folder_name(config) / "result.json"
    more = json.loads(result.read_text())["peak_memory_bytes"]["allocated"] // 20
    held: list[torch.Tensor] = []

    def holding(step: Callable[[TrainingLoop], None]) -> Callable[[TrainingLoop], None]:
        def stepping(self: TrainingLoop) -> None:
            if not held:
                held.append(torch.empty(more, dtype=torch.uint8, device=self.device))
            step(self)

        return stepping

    replaced(TrainingLoop, "step", holding)
    return config


PLANTS = {
    BASE: lambda config, work, base: config,
    "no_prefetch": no_prefetch,
    "no_limiter": no_limiter,
    "another_all_gather": another_all_gather,
    "another_copy": another_copy,
    "slower_kernels": slower_kernels,
    "more_memory": more_memory,
}


def sweep(folder: Path, variant: str, points: list[Config]) -> None:
    """All points at a time: there are as few of them as cores."""
    store = Store.open_or_create(folder / variant)
    with store.locked():
        store.write_space({"schema": 1, "model": "gpt-125m"}, points)
        started = [started_in_fork(folder, variant, config, store.work_folder(config)) for config in points]
        for config, work, child in started:
            _, status = os.waitpid(child, 0)
            if status:
                raise SystemExit(f"{variant}: {(work / 'stderr.log').read_text()}")
            # A regression is planted in the code, and not by another configuration.
            result = json.loads((work / "result.json").read_text())
            result["config"] = config.to_dict()
            (work / "result.json").write_text(json.dumps(result))
            store.commit(config, work)


def started_in_fork(folder: Path, variant: str, config: Config, work: Path) -> tuple[Config, Path, int]:
    child = os.fork()
    if child == 0:
        run_point(PLANTS[variant](config, work, folder / BASE).to_dict(), str(work))
    return config, work, child


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    preload()
    points = configurations()
    for variant in PLANTS:
        sweep(folder, variant, points)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
