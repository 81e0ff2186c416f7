"""`mode="reduce-overhead"`: one launch for a captured graph, memory of its own, reasons against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.simulated, pytest.mark.campaign]


def start() -> Any:
    """A simulated GPU on which things compile, without anything on disk."""
    from fsdpbench.sim import Simulation, load_profile
    from fsdpbench.sim.torch_device.compile.front_end import install

    install()
    torch._inductor.config.force_disable_caches = True
    return Simulation.start(load_profile("h100-80gb"), 1, 1)


def graphs() -> dict[str, Any]:
    from fsdpbench.sim.torch_device.compile.refusals import REPORT

    found: dict[str, Any] = REPORT.to_dict()["cuda_graphs"]
    return found


class Block(nn.Module):
    """Its own class: of `nn.Sequential`, torch compiles nothing that `module.compile()` is asked of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


def blocks(mode: str | None) -> nn.Module:
    with torch.device("sim"):
        made = nn.Sequential(*(Block() for _ in range(3)))
    for block in made:
        block.compile(mode=mode)
    return made


def train(simulation: Any, model: nn.Module, steps: int) -> list[tuple[int, int]]:
    """For each step the CPU's time to launch it, and kernels."""
    measured = []
    for _ in range(steps):
        x = torch.randn(8, 64, 64, device="sim", requires_grad=True)
        simulation.synchronize()
        began, launched = simulation.cpu_ns(), simulation.accelerator.operators_launched
        model(x).sum().backward()
        model.zero_grad()
        measured.append((simulation.cpu_ns() - began, simulation.accelerator.operators_launched - launched))
    return measured


def test_a_replay_is_one_launch_and_the_same_kernels() -> None:
    simulation = start()
    plain = train(simulation, blocks(None), 4)
    torch._dynamo.reset()
    captured = train(simulation, blocks("reduce-overhead"), 6)

    assert captured[-1][0] < 0.6 * plain[-1][0]
    assert 0 <= captured[-1][1] - plain[-1][1] <= 2  # copies of inputs that come from outside
    found = graphs()
    assert found["captures"] >= 6  # three blocks, forward and backward: each has parameters of its own
    assert found["replays"] > found["captures"]
    assert found["not_captured"] == {}


def test_its_memory_is_a_pool_that_is_not_given_back() -> None:
    simulation = start()
    model = blocks("reduce-overhead")
    train(simulation, model, 4)
    torch.sim.empty_cache()
    kept = torch.sim.memory_reserved()
    train(simulation, model, 2)
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == kept
    plain = start()
    torch._dynamo.reset()
    train(plain, blocks(None), 4)
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() < kept


def test_what_torch_does_not_capture_runs_without_and_is_told() -> None:
    """A user's input that is written into; values that pass through the host."""
    simulation = start()

    @torch.compile(mode="reduce-overhead")
    def grows(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    @torch.compile(mode="reduce-overhead")
    def over_the_host(x: torch.Tensor) -> torch.Tensor:
        return x.cpu() + 1

    x = torch.zeros(64, device="sim")
    for _ in range(4):
        grows(x)
        over_the_host(x)
    simulation.synchronize()

    found = graphs()
    assert (found["captures"], found["replays"]) == (0, 0)
    assert len(found["not_captured"]) == 2
    assert any(reason.startswith("mutated inputs") for reason in found["not_captured"])
    assert any("cpu device" in reason for reason in found["not_captured"])
