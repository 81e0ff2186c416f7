"""Plans of compiled graphs against Inductor's own metrics of the same graphs, and what running them does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.simulated
MODELS = ("gpt-tiny", "llama-tiny", "t5-tiny", "regnet-tiny")


class Pair(NamedTuple):
    """One graph: what Inductor's own GPU lowering counts, and its plan."""

    expected: Any
    plan: Any
    is_backward: bool


def start(profile: str = "h100-80gb") -> Any:
    """A simulated GPU on which things compile, without anything on disk."""
    from fsdpbench.sim import Simulation, load_profile
    from fsdpbench.sim.compile.front_end import install

    install()
    torch._inductor.config.force_disable_caches = True
    return Simulation.start(load_profile(profile), 1, 1)


def watch() -> list[Pair]:
    """Every graph that is lowered from now on."""
    from inductor_metrics import metrics_of

    from fsdpbench.sim.compile import lowering
    from fsdpbench.sim.compile.report import REPORT

    seen: list[Pair] = []
    original = lowering.lower

    def lower(gm: Any, inputs: Any, **about: Any) -> Any:
        is_backward = bool(about.get("is_backward"))
        expected = metrics_of(gm, inputs, is_backward)
        compiled = original(gm, inputs, **about)
        seen.append(Pair(expected, REPORT.plans[-1], is_backward))
        return compiled

    lowering.lower = lower
    return seen


class Mlp(nn.Module):
    """Norm, two products, an activation: the least that has every kind of kernel."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 256), nn.Linear(256, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def test_kernels_bytes_memory_and_trace_of_a_small_block(tmp_path: Path) -> None:
    simulation = start()
    seen = watch()
    with torch.device("sim"):
        block, x = Mlp(), torch.randn(8, 64, 64, requires_grad=True)
    before = torch.sim.memory_allocated()
    compiled = torch.compile(block)
    compiled(x).sum().backward()
    block.zero_grad()
    x.grad = None

    assert [pair.is_backward for pair in seen] == [False, True]
    for expected, plan, _ in seen:
        assert (len(plan.launches), plan.nbytes) == tuple(expected)
    assert torch.sim.memory_allocated() == before
    names = [launch.name for pair in seen for launch in pair.plan.launches]
    launched = simulation.operators_launched
    with simulation.trace(tmp_path / "trace.json.gz"):
        compiled(x).sum().backward()
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert [name for name in kernels if name.startswith("triton_")] == names
    assert sum("gemm" in name for name in kernels) == 6
    assert simulation.operators_launched - launched == len(kernels)
    _counts_of_dynamo(x)


def _counts_of_dynamo(x: torch.Tensor) -> None:
    """A break and a recompilation are counted, with their places; a fallback by its operator."""
    from fsdpbench.sim.compile.report import REPORT

    class Broken(nn.Module):
        scale = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.scale
            torch._dynamo.graph_break()
            return y + 1

    module = Broken()
    compiled = torch.compile(module)
    compiled(x.detach())
    module.scale = 2
    compiled(x.detach())
    found = REPORT.to_dict()
    assert sum(found["graph_breaks"].values()) >= 1
    assert any("test_plans.py" in place for place in found["recompilations"])


@pytest.mark.campaign
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_kernels_and_bytes_are_inductors(model: str, checkpointing: str) -> None:
    from fsdpbench.systems.wrapping import select_units
    from fsdpbench.workloads import get_workload

    start()
    seen = watch()
    workload = get_workload(model)
    seq = workload.resolve_seq(None)
    with torch.device("sim"):
        network = workload.build(activation_checkpointing=checkpointing, seq=seq)
    units = select_units(network, workload, "block")
    for unit in units:
        unit.compile()
    batch = next(iter(workload.batches(2, seq, 0, 0, torch.device("sim"))))
    with torch.autocast("sim", dtype=torch.bfloat16):
        loss = network(*batch)
    loss.backward()

    assert len({pair.is_backward for pair in seen}) == 2
    for expected, plan, _ in seen:
        assert expected.kernels
        assert (len(plan.launches), plan.nbytes) == tuple(expected)
