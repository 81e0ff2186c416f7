"""The rate limiter and the queue of collectives under ``FullyShardedDataParallel``, on simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_cases import LAYERS, UNIT_BYTES, WIDTH, Layer
from timeline_cases import Four, Named, kernels_of_third_step
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

from fsdpbench import impl

ROWS = 8 * WIDTH
BATCH = ROWS * WIDTH * 4
ACTIVATIONS = 2 * BATCH
"""A layer's output beside the next one's."""


@contextmanager
def simulated(units_of_memory: int | None = None) -> Iterator[torch.device]:
    """8 GPUs, with room for shards, activations and so many units beside what a process always takes."""
    from fsdpbench.sim import Simulation, load_profile

    profile = load_profile("a100-80gb")
    if units_of_memory is not None:
        taken = profile.memory_bytes - profile.usable_memory_bytes
        shards = LAYERS * UNIT_BYTES // 8
        wanted = taken + BATCH + ACTIVATIONS + shards + int((units_of_memory + 0.5) * UNIT_BYTES)
        profile = replace(profile, memory=replace(profile.memory, capacity_gib=wanted / 2**30))
    simulation = Simulation.start(profile, world_size=8, gpus_per_node=8)
    simulation.init_process_group()
    try:
        yield torch.device("sim", 0)
    finally:
        dist.destroy_process_group()


def forwards(limit: int | bool | str, units_of_memory: int | None, count: int) -> dict[str, Any]:
    """Forwards whose computation is far slower than their gathers: units reserved for, retries, the limit."""
    with simulated(units_of_memory) as device:
        model = impl.FullyShardedDataParallel(
            nn.Sequential(*[Layer() for _ in range(LAYERS)]),
            auto_wrap_policy=impl.ModuleWrapPolicy({Layer}),
            device_id=device,
            limit_all_gathers=limit,
        )
        batch = torch.empty(ROWS, WIDTH, device=device)
        torch.sim.empty_cache()
        before = torch.sim.memory_stats()["reserved_bytes.all.current"]
        retries = []
        with torch.no_grad():
            for _ in range(count):
                model(batch)
                model._hooks.runtime.context.limiter.end_iteration()
                torch.sim.synchronize()
                retries.append(torch.sim.memory_stats()["num_alloc_retries"])
        peak = torch.sim.memory_stats()["reserved_bytes.all.peak"]
        return {
            "units": round((peak - before - ACTIVATIONS) / UNIT_BYTES),
            "retries": retries,
            "limit": model._hooks.runtime.context.limiter.limit,
        }


def case_forwards(rank: int, **arguments: Any) -> dict[str, Any]:
    return forwards(**arguments)


@pytest.mark.parametrize(("limit", "units"), [(1, 1), (2, 2), (3, 3), (False, LAYERS)])
def test_reserved_memory_follows_the_limit(lone_process, limit: int | bool, units: int) -> None:
    found = lone_process.run(case_forwards, limit=limit, units_of_memory=None, count=2)
    assert found["units"] == units, found
    assert found["retries"][-1] == 0


@pytest.mark.parametrize("limit", [1, 2, 3, False])
def test_retries_come_without_a_limit(lone_process, limit: int | bool) -> None:
    """On a GPU with room for four units in flight."""
    found = lone_process.run(case_forwards, limit=limit, units_of_memory=4, count=3)
    assert bool(found["retries"][-1]) == (limit is False), found


def test_an_adapting_limit_ends_retries(lone_process) -> None:
    """With little room two in flight are too many: the limit goes to one, and no retry follows."""
    found = lone_process.run(case_forwards, limit="auto", units_of_memory=2, count=6)
    assert found["limit"] == 1, found
    assert found["retries"][-1] == found["retries"][-3] > 0, found


def queueing(prefetch: impl.BackwardPrefetch | None) -> dict[str, Any]:
    with simulated() as device:
        model = impl.FullyShardedDataParallel(
            Four(),
            auto_wrap_policy=impl.CustomPolicy(
                lambda module: isinstance(module, Named) and module.name in ("m2", "m3")
            ),
            backward_prefetch=prefetch,
            device_id=device,
        )
        # Little computation, so that communication is what counts.
        return kernels_of_third_step(model, torch.empty(WIDTH // 8, WIDTH, device=device, requires_grad=True))


def case_queueing(rank: int) -> None:
    """Without prefetch the gather of m2 waits for the reduction of m3 in their one communicator."""
    without = queueing(None)
    ahead = queueing(impl.BackwardPrefetch.BACKWARD_PRE)
    assert without["AG m2"][1][0] >= without["RS m3"][0][1]
    assert ahead["AG m2"][1][0] < ahead["RS m3"][0][0]


def test_without_prefetch_gathers_queue_behind_reductions(lone_process) -> None:
    lone_process.run(case_queueing)


class TiedEnds(nn.Module):
    """A large weight of the root, read first and last, around a wrapped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH, device="sim")
        self.layer = Layer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.layer(self.embed(tokens)), self.embed.weight)


def case_low_precision_copy(rank: int) -> None:
    """Beside the loss no copy of a weight is left, as in torch's FSDP1, where forward casts whole weights."""
    peaks = {}
    for api, policy in ((impl, impl.ModuleWrapPolicy), (torch_fsdp, TorchModuleWrapPolicy)):
        with simulated() as device:
            model = api.FullyShardedDataParallel(
                TiedEnds(),
                auto_wrap_policy=policy({Layer}),
                sharding_strategy=api.ShardingStrategy.NO_SHARD,
                mixed_precision=api.MixedPrecision(torch.bfloat16, torch.bfloat16),
                device_id=device,
            )
            tokens = torch.zeros(16 * WIDTH, dtype=torch.long, device=device)
            nn.functional.cross_entropy(model(tokens).float(), tokens).backward()
            peaks[api] = torch.sim.max_memory_allocated()
    assert peaks[impl] <= peaks[torch_fsdp] + 2**20, peaks


def test_low_precision_copy_of_a_whole_root_is_freed(lone_process) -> None:
    lone_process.run(case_low_precision_copy)
