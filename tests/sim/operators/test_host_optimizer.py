"""Optimizer steps on the host cost what going through its memory takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.simulated
ELEMENTS = 3_000_000


def step_ns(
    parameter: nn.Parameter, optimizer: type[torch.optim.Optimizer], **options: Any
) -> tuple[int, float]:
    """Nanoseconds of the CPU that a step takes, and those that a byte of the host's memory does."""
    from device_training import start

    sim = start()
    stepper = optimizer([parameter], lr=0.1, **options)  # type: ignore[call-arg]
    parameter.grad = torch.ones_like(parameter)
    before = sim.cpu_ns()
    stepper.step()
    return sim.cpu_ns() - before, 1.0 / sim.profile.host_link.memory_gb_s


@pytest.mark.parametrize(
    ("optimizer", "options", "accesses"),
    [
        (torch.optim.AdamW, {"fused": True}, 7),  # parameter and two states twice, the gradient once
        (torch.optim.AdamW, {"foreach": False}, 3 * 7),
        (torch.optim.SGD, {"fused": True}, 3),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}, 5),
    ],
)
def test_a_step_goes_through_memory(optimizer: Any, options: dict[str, Any], accesses: int) -> None:
    took, byte_ns = step_ns(nn.Parameter(torch.zeros(ELEMENTS)), optimizer, **options)
    assert took == pytest.approx(accesses * 4 * ELEMENTS * byte_ns, rel=1e-3)


def test_a_sharded_parameter_counts_with_its_own_part() -> None:
    from device_training import start
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    sim = start()
    mesh = init_device_mesh("sim", (sim.world_size,))
    local = torch.zeros(1000, 100)
    whole = TensorMeta(torch.Size((1000 * sim.world_size, 100)), (100, 1), local.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=whole)

    def sharded(part: torch.Tensor) -> torch.Tensor:
        # As fully_shard makes them; `from_local` would move the part to the mesh's device.
        return DTensor(part, spec, requires_grad=False)  # type: ignore[call-arg]

    parameter = nn.Parameter(sharded(local))
    assert parameter.numel() == sim.world_size * local.numel()
    parameter.grad = sharded(torch.ones_like(local))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    before = sim.cpu_ns()
    optimizer.step()
    assert sim.cpu_ns() - before == pytest.approx(
        21 * local.nbytes / sim.profile.host_link.memory_gb_s, rel=0.01
    )


def test_parameters_on_the_device_cost_the_host_nothing_by_their_size() -> None:
    from device_training import start

    sim = start()
    took = []
    for elements in (1000, ELEMENTS):
        parameter = nn.Parameter(torch.zeros(elements, device="sim"))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        optimizer.step()  # makes its states
        before = sim.cpu_ns()
        optimizer.step()
        took.append(sim.cpu_ns() - before)
    assert took[0] == took[1]
