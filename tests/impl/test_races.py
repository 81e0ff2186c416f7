"""No two streams use the same memory unordered: what is asked for on the simulated device, followed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_cases import simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl
from fsdpbench.sim.accelerator import ACCELERATOR
from fsdpbench.sim.sanitizer import Sanitizer

WIDTH = 256
LOW = (torch.bfloat16, torch.float32)


def sharded(
    mesh: tuple[int, ...] = (8,), *, offload: bool = False, policy: Any = None, **arguments: Any
) -> Any:
    names = ("replicate", "shard")[-len(mesh) :]
    arguments["mesh"] = init_device_mesh("sim", mesh, mesh_dim_names=names)
    if policy is not None:
        arguments["mp_policy"] = impl.MixedPrecisionPolicy(*policy)
    if offload:
        arguments["offload_policy"] = impl.CPUOffloadPolicy()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model = model if offload else model.to("sim")
    for layer in model:
        impl.fully_shard(layer, **arguments)
    return impl.fully_shard(model, **arguments)


def wrapped(**arguments: Any) -> Any:
    return impl.FullyShardedDataParallel(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]),
        auto_wrap_policy=impl.ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("sim", 0),
        **arguments,
    )


Program = Callable[[Any, torch.optim.Optimizer, Callable[[], torch.Tensor]], None]


def accumulate(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    for _ in range(3):
        loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def unshard_after_the_optimizer(
    model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    loss().backward()
    optimizer.step()
    model[0].unshard()
    model[1].unshard(async_op=True)
    optimizer.zero_grad()
    loss().backward()
    model[0].unshard()
    optimizer.step()
    optimizer.zero_grad()


def backward_twice(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    value = loss()
    value.backward(retain_graph=True)
    optimizer.step()
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def write_between(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """Before backward gathers again: by hand, and by a state dict."""
    value = loss()
    for module in (*model, model):
        module.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(model.state_dict())
    value.backward()
    optimizer.zero_grad()


def optimizer_in_backward(
    model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    for parameter in model.parameters():
        if not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(_step)
    loss().backward()
    loss().backward()


def _step(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


CASES: list[tuple[Program, Callable[..., Any], dict[str, Any]]] = [
    (unshard_after_the_optimizer, sharded, {}),
    (unshard_after_the_optimizer, sharded, {"policy": LOW}),
    (unshard_after_the_optimizer, sharded, {"offload": True}),
    (backward_twice, sharded, {"policy": LOW}),
    (write_between, sharded, {}),
    (write_between, sharded, {"offload": True}),
    (write_between, sharded, {"reshard_after_forward": 2}),
    (accumulate, sharded, {"mesh": (2, 4)}),
    (accumulate, sharded, {"mesh": (2, 4), "policy": LOW, "memory_handover": "record_stream"}),
    (optimizer_in_backward, sharded, {"mesh": (2, 4), "policy": LOW}),
    (accumulate, wrapped, {}),
    (accumulate, wrapped, {"memory_handover": "events"}),
]


def follow(program: Program, build: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[str], int]:
    with simulated(sanitize=True) as device:
        model = build(**arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        batch = torch.randn(8, WIDTH, device=device)

        def loss() -> torch.Tensor:
            return model(batch).sum()

        for _ in range(2):  # the first time makes buffers and optimizer states
            program(model, optimizer, loss)
        sanitizer = ACCELERATOR.sanitizer
        assert isinstance(sanitizer, Sanitizer)
        return [str(finding.to_dict()) for finding in sanitizer.findings], sanitizer.accesses


def case_nothing_races(rank: int, *, case: int) -> None:
    races, seen = follow(*CASES[case])
    assert not races, races
    assert seen > 50


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=[f"{p.__name__}-{b.__name__}-{a}" for p, b, a in CASES]
)
def test_nothing_races(lone_process, case: int) -> None:
    lone_process.run(case_nothing_races, case=case)


MESHES: list[dict[str, Any]] = [
    {},
    {"mesh": (2, 4)},
    {"reshard_after_forward": 2},
    {"reshard_after_forward": False},
]
MEMORY: list[dict[str, Any]] = [{}, {"memory_handover": "record_stream"}, {"offload": True}]
PREFETCH: list[dict[str, Any]] = [
    {},
    {"forward_prefetch_depth": 2, "backward_prefetch_depth": 2},
    {"backward_prefetch": "post"},
    {"backward_prefetch": None, "limit_all_gathers": 1},
]
POLICIES: list[dict[str, Any]] = [{}, {"policy": LOW}, {"policy": (torch.bfloat16, torch.bfloat16)}]
PROGRAMS = [accumulate, unshard_after_the_optimizer, backward_twice, write_between, optimizer_in_backward]


def case_every_combination(rank: int) -> tuple[int, int, list[str]]:
    tried, uses, failed = 0, 0, []
    for parts in itertools.product(PROGRAMS, MESHES, MEMORY, PREFETCH, POLICIES):
        arguments = {key: value for part in parts[1:] for key, value in part.items()}
        races, seen = follow(parts[0], sharded, arguments)
        tried, uses = tried + 1, uses + seen
        if races:
            failed.append(f"{parts[0].__name__} {arguments}: {races[0]}")
    return tried, uses, failed


@pytest.mark.campaign
def test_every_combination(lone_process) -> None:
    tried, uses, failed = lone_process.run(case_every_combination, timeout=3000)
    print(f"{tried} combinations, {uses} uses of memory followed, {len(failed)} with races")
    assert not failed, "\n".join(failed)
    assert tried == 720
