"""Backward's prefetch waits for the first gradient where that saves memory, and never too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from simulated_cases import simulated
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdpbench import impl
from fsdpbench.impl.runtime.hooks import hooks_of, stage_of
from fsdpbench.impl.runtime.schedule import FirstGradient

RANKS = 64
WIDTH = 4096


class Block(nn.Module):
    """Parameters that take far more than its activations, as those of large models at batch 1 do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._compute, x, use_reentrant=False)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Outer(nn.Module):
    """A unit with others inside, whose own gradients are its last; it returns what the last one did, or
    not.
    """

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.factor = factor
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.first(x))
        return x if self.factor is None else self.factor * x


def sharded(api: Any, model: nn.Module, kinds: tuple[type, ...]) -> nn.Module:
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("sim", (RANKS,))
    for module in [m for m in model.modules() if isinstance(m, kinds)][::-1]:  # inner ones first
        api.fully_shard(module, mp_policy=policy, mesh=mesh)
    return api.fully_shard(model, mp_policy=policy, mesh=mesh)


class WithHead(nn.Module):
    """Blocks, and a head of the root's whose output is larger than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 8 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(self.head(self.blocks(x)).float(), -1)


def step(model: nn.Module, device: torch.device, tokens: int = 256) -> None:
    model(torch.empty(tokens, WIDTH, device=device, dtype=torch.bfloat16)).sum().backward()
    torch.sim.synchronize()
    model.zero_grad()


def blocks() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)])


def measure(api: Any, make: Callable[[], nn.Module] = blocks, tokens: int = 256) -> dict[str, float]:
    """The second step's peaks and time."""
    from fsdpbench.sim import Simulation, load_profile

    simulation = Simulation.start(load_profile("h100-80gb"), world_size=RANKS, gpus_per_node=8)
    simulation.init_process_group()
    device = torch.device("sim", 0)
    with torch.device("sim"):
        model = sharded(api, make(), (Block,))
    try:
        for _ in range(2):
            torch.sim.reset_peak_memory_stats()
            began = simulation.cpu_ns()
            step(model, device, tokens)
        return {
            "allocated": torch.sim.max_memory_allocated(),
            "reserved": torch.sim.max_memory_reserved(),
            "ns": simulation.cpu_ns() - began,
        }
    finally:
        dist.destroy_process_group()


def case_peaks(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    return measure(impl), measure(torch_fsdp)


def test_large_units_take_no_more_than_torch(lone_process) -> None:
    ours, torchs = lone_process.run(case_peaks, timeout=120)
    assert ours["allocated"] <= torchs["allocated"], (ours, torchs)
    assert ours["reserved"] <= torchs["reserved"]
    assert ours["ns"] <= torchs["ns"]


def case_loss(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    return measure(impl, WithHead, 8192), measure(torch_fsdp, WithHead, 8192)


def test_no_unit_is_gathered_beside_the_loss(lone_process) -> None:
    """Where torch has gathered the last block."""
    ours, torchs = lone_process.run(case_loss, timeout=120)
    gathered = 2 * 2 * 4 * WIDTH * WIDTH  # bytes of a block in bf16
    assert ours["allocated"] <= torchs["allocated"] - 0.9 * gathered, (ours, torchs)
    assert ours["ns"] <= torchs["ns"]


def case_nested(rank: int) -> None:
    with simulated(RANKS) as device:
        with torch.device("sim"):
            outer, around = Outer(2.0), Outer(None)
            model = sharded(impl, nn.Sequential(Block(), around, outer, Block()), (Block, Outer))
        for _ in range(2):
            step(model, device)
        schedule = hooks_of(model).runtime.schedule  # type: ignore[union-attr]
        assert schedule._late._never == {stage_of(outer)}
        assert {stage_of(outer.blocks[0]), stage_of(around.blocks[1])} <= set(schedule._late._first_gradients)


def test_a_unit_with_others_inside_gathers_them_in_time(lone_process) -> None:
    lone_process.run(case_nested)


def arrivals(first: FirstGradient, parameters: list[nn.Parameter], used: list[nn.Parameter]) -> None:
    first.expect(parameters)
    product = torch.ones(())
    for parameter in used:
        product = torch.sin(parameter * product)
    product.backward()


def test_one_parameter_is_asked_once_it_is_known() -> None:
    a, b, c = (nn.Parameter(torch.ones(())) for _ in range(3))
    seen: list[list[bool]] = []
    first = FirstGradient(lambda: seen.append([p.grad is not None for p in (a, b, c)]))
    arrivals(first, [a, b, c], [a, b, c])
    assert len(seen) == 1
    assert sum(seen[0]) == 1
    known = seen[0].index(True)
    assert [bool(p._post_accumulate_grad_hooks) for p in (a, b, c)] == [p == known for p in range(3)]
    arrivals(first, [a, b, c], [p for at, p in enumerate((a, b, c)) if at != known])
    assert first.expected
    assert len(seen) == 1
    first.miss()
    assert not any(p._post_accumulate_grad_hooks for p in (a, b, c))
    arrivals(first, [a, b, c], [a, b, c])
    assert len(seen) == 2
