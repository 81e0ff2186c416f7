"""CPU offload on the simulated device: what it takes and frees there, and what runs beside what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_cases import LAYERS, UNIT_BYTES, WIDTH, Layer, simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl

RANKS = 8
SHARD_BYTES = 4 * WIDTH * WIDTH // RANKS
HALF = (torch.bfloat16, torch.float32)


def build(kind: str, pins: bool | None, policy: tuple[torch.dtype, ...] | None) -> Any:
    from torch.distributed import fsdp as torch_fsdp

    api: Any = torch_fsdp if kind == "torch" else impl
    arguments: dict[str, Any] = {"mesh": init_device_mesh("sim", (RANKS,))}
    if pins is not None:
        arguments["offload_policy"] = api.CPUOffloadPolicy(pin_memory=pins)
    if policy is not None:
        arguments["mp_policy"] = api.MixedPrecisionPolicy(*policy)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    for layer in model:
        api.fully_shard(layer, **arguments)
    return api.fully_shard(model, **arguments)


def measure(
    kind: str, *, rows: int, pins: bool | None = True, policy: Any = None, microbatches: int = 1
) -> dict[str, float]:
    """The third step: peaks and what stays, in bytes; nanoseconds; copies over the host link."""
    with simulated(RANKS) as device:
        from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

        model = build(kind, pins, policy)
        batch = torch.empty(rows, WIDTH, device=device)
        found: dict[str, float] = {}
        copies: list[tuple[str, int, bool]] = []
        copy = ACCELERATOR.copy_over_host_link

        def counted(direction: str, nbytes: int, *, blocking: bool, **sides: Any) -> None:
            copies.append((direction, nbytes, blocking))
            copy(direction, nbytes, blocking=blocking, **sides)

        ACCELERATOR.copy_over_host_link = counted  # type: ignore[method-assign]
        for _ in range(3):
            torch.sim.synchronize()
            copies.clear()
            start = ACCELERATOR.timeline.cpu
            torch.sim.reset_peak_memory_stats()
            for _ in range(microbatches):
                model(batch).sum().backward()
            found["cpu_ns"] = ACCELERATOR.timeline.cpu - start
            torch.sim.synchronize()
            found["ns"] = ACCELERATOR.timeline.cpu - start
            found["peak"] = torch.sim.max_memory_allocated()
            found["reserved"] = torch.sim.max_memory_reserved()
            found["kept"] = torch.sim.memory_allocated() - batch.nbytes
            for parameter in model.parameters():
                assert parameter.device.type == ("cpu" if pins is not None else "sim")
                assert parameter.grad.to_local().device == parameter.to_local().device
            model.zero_grad()
        for direction in ("HtoD", "DtoH"):
            found[direction] = sum(nbytes for kind, nbytes, _ in copies if kind == direction)
            found[f"{direction} blocking"] = sum(held for kind, _, held in copies if kind == direction)
        return found


def case_beside_torch(rank: int, *, rows: int, policy: Any) -> None:
    ours, theirs = (measure(kind, rows=rows, policy=policy) for kind in ("impl", "torch"))
    assert ours["HtoD"] == theirs["HtoD"] == 2 * LAYERS * SHARD_BYTES
    assert ours["DtoH"] == theirs["DtoH"] == LAYERS * SHARD_BYTES
    assert ours["HtoD blocking"] == ours["DtoH blocking"] == 0
    assert ours["ns"] <= theirs["ns"], (ours, theirs)
    # One gradient more stays until its copy is done, so that the next unit need not wait for it: that of a
    # whole unit where it is cast, of a shard otherwise.
    more = SHARD_BYTES + (0 if policy is None else UNIT_BYTES // 2)
    assert ours["peak"] <= theirs["peak"] + more, (ours, theirs)
    assert ours["reserved"] <= theirs["reserved"], (ours, theirs)


@pytest.mark.plain_cases("computing-fp32", "copying-bf16")
@pytest.mark.parametrize("policy", [None, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [WIDTH, WIDTH // 16], ids=["computing", "copying"])
def test_copies_as_much_and_takes_no_longer_than_torch(lone_process, rows: int, policy: Any) -> None:
    lone_process.run(case_beside_torch, rows=rows, policy=policy)


def case_frees_the_device(rank: int) -> None:
    resident, offloaded = (measure("impl", rows=WIDTH, pins=pins) for pins in (None, True))
    model = LAYERS * SHARD_BYTES
    assert resident["kept"] - offloaded["kept"] == 2 * model  # parameters and gradients
    assert resident["peak"] - offloaded["peak"] >= model  # gradients were not all there at the peak


def test_neither_parameters_nor_gradients_stay_on_the_device(lone_process) -> None:
    lone_process.run(case_frees_the_device)


def case_waits(rank: int, *, microbatches: int) -> None:
    """When backward returns the gradients are there: nothing is left to wait for but the last copies'
    stream.
    """
    found = measure("impl", rows=WIDTH // 16, microbatches=microbatches)
    assert found["ns"] - found["cpu_ns"] < 0.01 * found["ns"]
    assert found["DtoH blocking"] == 0  # also where gradients are added to earlier ones
    resident = measure("impl", rows=WIDTH // 16, pins=None, microbatches=microbatches)
    assert resident["ns"] - resident["cpu_ns"] > 0.1 * resident["ns"]  # the CPU ran ahead


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_have_arrived_when_backward_returns(lone_process, microbatches: int) -> None:
    lone_process.run(case_waits, microbatches=microbatches)


def case_pageable(rank: int) -> None:
    found = measure("impl", rows=WIDTH // 16, pins=False)
    assert found["DtoH blocking"] == LAYERS  # memory that is not pinned: the CPU is held


def test_without_pinned_memory_copies_back_block(lone_process) -> None:
    lone_process.run(case_pageable)


def case_materialised_on_the_device(rank: int) -> None:
    with simulated(RANKS) as device:
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(16, 16))
        policy = impl.CPUOffloadPolicy()
        impl.fully_shard(model, mesh=init_device_mesh("sim", (RANKS,)), offload_policy=policy)
        model.to_empty(device=device)
        with pytest.raises(RuntimeError, match=r"materialized on CPU .* unit 'root' \('0.weight'"):
            model(torch.empty(4, 16, device=device))


def test_parameters_materialised_on_the_device_are_refused(lone_process) -> None:
    lone_process.run(case_materialised_on_the_device)
