"""Memory and streams, exactly, on the simulated device: rate limiter, handover, and peaks beside torch's."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_cases import LAYERS, UNIT_BYTES, WIDTH, Layer, simulated
from torch import nn

from fsdpbench import impl


def units_at_peak(limit: int | bool, handover: str) -> float:
    """Unit buffers alive at once in a forward whose computation is far slower than its gathers."""
    with simulated() as device:
        layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        model = impl.FullyShardedDataParallel(
            layers,
            auto_wrap_policy=impl.ModuleWrapPolicy({Layer}),
            device_id=device,
            limit_all_gathers=limit,
            memory_handover=handover,
        )
        batch = torch.empty(8 * WIDTH, WIDTH, device=device)
        activations = 2 * batch.numel() * 4  # a layer's output beside the next one's
        with torch.no_grad():
            model(batch)
            torch.sim.synchronize()
            torch.sim.empty_cache()  # also takes back the blocks that other streams used
            torch.sim.reset_peak_memory_stats()
            before = torch.sim.memory_stats()["active_bytes.all.current"]
            model(batch)
            torch.sim.synchronize()
        peak = torch.sim.memory_stats()["active_bytes.all.peak"]
        return (peak - before - activations) / UNIT_BYTES


def case_limit(rank: int, *, limit: int | bool, handover: str, expected: int) -> None:
    found = units_at_peak(limit, handover)
    assert found == expected, found


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (True, 2), (3, 3), (False, LAYERS)])
def test_limiter_bounds_units_in_flight(lone_process, limit: int | bool, expected: int) -> None:
    lone_process.run(case_limit, limit=limit, handover="record_stream", expected=expected)


@pytest.mark.parametrize("limit", [2, False])
def test_events_need_no_limit(lone_process, limit: int | bool) -> None:
    lone_process.run(case_limit, limit=limit, handover="events", expected=2)


# -- beside torch --------------------------------------------------------------------------------------------


class Small(nn.Module):
    """One of many layers whose collectives are far below what fills a link."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)
        self.norm = nn.LayerNorm(512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.relu(self.linear(x)))


class ManySmall(nn.Module):
    def __init__(self, count: int = 100) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Small() for _ in range(count)])
        self.head = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)).sum()


def make_model(name: str, device: torch.device) -> tuple[nn.Module, set[type[nn.Module]], Any]:
    """A model on the device, the classes to wrap and its batches."""
    from fsdpbench.workloads import get_workload

    with torch.device("sim"):
        if name == "many small layers":
            return ManySmall(), {Small}, repeat((torch.empty(4096, 512, device=device),))
        workload = get_workload(name)
        model = workload.build(activation_checkpointing="none", seq=1024)
    return model, set(workload.block_classes), workload.batches(2, 1024, seed=0, rank=0, device=device)


def measure(system: str, model_name: str = "gpt-350m", **settings: Any) -> dict[str, float]:
    """Three steps of a model on 8 simulated GPUs; peaks and time of the last one."""
    from fsdpbench.sim import Simulation, load_profile

    simulation = Simulation.start(load_profile("a100-80gb"), world_size=8, gpus_per_node=8)
    simulation.init_process_group()
    try:
        device = torch.device("sim", 0)
        model, blocks, batches = make_model(model_name, device)
        model = build(system, model, blocks, device, settings)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        found: dict[str, float] = {}
        for _ in range(3):
            simulation.synchronize()
            start = simulation.cpu_ns()
            torch.sim.reset_peak_memory_stats()
            loss = model(*next(batches))
            found["forward"] = torch.sim.max_memory_allocated()
            torch.sim.reset_peak_memory_stats()
            loss.backward()
            found["backward"] = torch.sim.max_memory_allocated()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            simulation.synchronize()
            found["ns"] = simulation.cpu_ns() - start
            found["after"] = torch.sim.memory_allocated()
        found["retries"] = torch.sim.memory_stats()["num_alloc_retries"]
        return found
    finally:
        dist.destroy_process_group()


def build(
    system: str, model: Any, blocks: set[type[nn.Module]], device: torch.device, settings: dict[str, Any]
) -> nn.Module:
    from torch.distributed import fsdp as torch_fsdp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

    api: Any = torch_fsdp if system.startswith("torch") else impl
    reduced = settings.pop("bf16", False)
    if system.endswith("fsdp2"):
        settings["mesh"] = init_device_mesh("sim", (8,))
        if reduced:
            settings["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for module in [m for m in model.modules() if type(m) in blocks]:
            api.fully_shard(module, **settings)
        return api.fully_shard(model, **settings)
    policy: Any = TorchModuleWrapPolicy if api is torch_fsdp else impl.ModuleWrapPolicy
    if reduced:
        settings["mixed_precision"] = api.MixedPrecision(torch.bfloat16, torch.float32)
    return api.FullyShardedDataParallel(model, auto_wrap_policy=policy(blocks), device_id=device, **settings)


BLOCK_ROUNDING = 26 * 2**20
"""One flat shard of a unit in place of one for each parameter: the allocator rounds other sizes (a MiB a
unit).
"""


def case_no_more_than_torch(
    rank: int, *, generation: str, settings: dict[str, Any], model: str = "gpt-350m"
) -> None:
    ours = measure(f"impl-{generation}", model, **dict(settings))
    theirs = measure(f"torch-{generation}", model, **dict(settings))
    for what in ("forward", "backward", "after"):
        assert ours[what] <= theirs[what] + BLOCK_ROUNDING, (what, ours, theirs)
    assert ours["retries"] <= theirs["retries"]
    assert ours["ns"] <= theirs["ns"], (ours, theirs)


@pytest.mark.plain_cases("bf16")
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.campaign), {"bf16": True}, {"reshard_after_forward": False}],
    ids=["fp32", "bf16", "kept"],
)
def test_fully_shard_takes_no_more_than_torch(lone_process, settings: dict[str, Any]) -> None:
    lone_process.run(case_no_more_than_torch, generation="fsdp2", settings=settings, timeout=120)


class OwnMemory:
    """The ordinary all-gather, in memory that it allocates."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def case_custom_memory(rank: int) -> None:
    found = {}
    for custom in (False, True):
        with simulated() as device:
            model: Any = nn.Sequential(*[Layer() for _ in range(4)])
            policy = impl.MixedPrecisionPolicy(torch.bfloat16)
            for module in (*model, model):
                impl.fully_shard(module, mp_policy=policy)
                if custom:
                    module.set_custom_all_gather(OwnMemory())
            for _ in range(2):
                torch.sim.reset_peak_memory_stats()
                model(torch.empty(16, WIDTH, device=device)).sum().backward()
                model.zero_grad()
            found[custom] = torch.sim.max_memory_allocated()
    assert found[True] <= 1.05 * found[False], found


def test_memory_of_a_custom_gather_is_given_back(lone_process) -> None:
    lone_process.run(case_custom_memory)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.campaign), {"bf16": True}], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("model", [pytest.param("gpt-2.8b", marks=pytest.mark.campaign), "many small layers"])
def test_fully_shard_on_large_and_on_many_units(lone_process, model: str, settings: dict[str, Any]) -> None:
    lone_process.run(case_no_more_than_torch, generation="fsdp2", settings=settings, model=model, timeout=120)


@pytest.mark.plain_cases("bf16")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.campaign),
        {"bf16": True},
        {"limit_all_gathers": False},
        {"use_orig_params": True},
    ],
    ids=["fp32", "bf16", "no limit", "original"],
)
def test_flat_takes_no_more_than_torch(lone_process, settings: dict[str, Any]) -> None:
    lone_process.run(case_no_more_than_torch, generation="fsdp1", settings=settings, timeout=120)


def case_prefetch(rank: int, *, generation: str) -> None:
    """Where communication is dear, gathering ahead in backward is faster than not, and costs a unit of
    memory.
    """
    none: dict[str, Any] = {"backward_prefetch": None}
    without = measure(f"impl-{generation}", **none)
    ahead = measure(f"impl-{generation}")
    assert ahead["ns"] < without["ns"]


@pytest.mark.plain_cases("fsdp2")
@pytest.mark.parametrize("generation", ["fsdp1", "fsdp2"])
def test_backward_prefetch_is_faster(lone_process, generation: str) -> None:
    lone_process.run(case_prefetch, generation=generation, timeout=120)
