"""Plans of compiled graphs against Inductor's own metrics of the same graphs, and what running them does."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
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
    from fsdpbench.sim.torch_device.compile.front_end import install

    install()
    torch._inductor.config.force_disable_caches = True
    return Simulation.start(load_profile(profile), 1, 1)


def watch() -> list[Pair]:
    """Every graph that is lowered from now on."""
    from inductor_metrics import metrics_of

    from fsdpbench.sim.torch_device.compile import lowering
    from fsdpbench.sim.torch_device.compile.refusals import REPORT

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


def test_a_small_block_runs_the_kernels_that_inductor_made(tmp_path: Path) -> None:
    """Torch's own count of this very lowering; a trace with its kernels; no buffer stays behind."""
    from torch._inductor import metrics
    from torch._prims.rng_prims import run_and_save_rng_state

    from fsdpbench.sim.torch_device.compile.refusals import REPORT

    relu = torch.ops.aten.relu.default
    run_and_save_rng_state(relu, torch.ones(1))  # what it found for the CPU does not stay found
    simulation = start()
    with torch.device("sim"):
        block, x = Mlp(), torch.randn(8, 64, 64, requires_grad=True)
    before = torch.sim.memory_allocated()
    compiled = torch.compile(block)
    for _ in range(2):
        compiled(x).sum().backward()
        block.zero_grad()
        x.grad = None

    assert torch.sim.memory_allocated() == before
    names = [launch.name for plan in REPORT.plans for launch in plan.launches]
    assert len(names) == metrics.generated_kernel_count > 0
    assert REPORT.calls == 4
    launched = simulation.accelerator.operators_launched
    with simulation.trace(tmp_path / "trace.json.gz"):
        compiled(x).sum().backward()
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert [name for name in kernels if name.startswith("triton_")] == names
    assert sum("gemm" in name for name in kernels) == 6
    assert simulation.accelerator.operators_launched - launched == len(kernels)
    assert REPORT.to_dict()["graphs"] == 2
    assert run_and_save_rng_state(relu, x)[1].device.type == "sim"
    _breaks_and_recompilations_are_counted(x.detach())


def _breaks_and_recompilations_are_counted(x: torch.Tensor) -> None:
    from breaking import Breaking

    from fsdpbench.sim.torch_device.compile.refusals import REPORT

    module = Breaking()
    compiled = torch.compile(module, backend="eager")
    compiled(x)
    found = REPORT.to_dict()
    assert [reason for reason in found["graph_breaks"] if "graph_break()" in reason]
    assert not [place for place in found["recompilations"] if "breaking.py" in place]
    module.scale = 2
    for _ in range(2):
        compiled(x)
    found = REPORT.to_dict()
    place = next(place for place in found["recompilations"] if "breaking.py" in place)
    assert place.startswith("forward ")
    assert found["recompilations"][place] == 1


def test_eager_training_does_not_import_the_compiler() -> None:
    import fsdpbench.sim
    from fsdpbench.sim import Simulation, load_profile

    Simulation.start(load_profile("h100-80gb"), 1, 1)
    with torch.device("sim"):
        Mlp()(torch.randn(2, 64)).sum().backward()

    assert fsdpbench.sim.__name__ in sys.modules
    assert not [
        name
        for name in sys.modules
        if name.startswith(("torch._inductor.", "fsdpbench.sim.torch_device.compile"))
    ]


@pytest.mark.campaign
def test_dynamo_does_the_same_as_on_the_cpu() -> None:
    """Which frames it compiles and compiles again, and its breaks: as in a process without the simulator."""
    import breaking

    here = Path(breaking.__file__)
    plain = subprocess.run([sys.executable, str(here)], capture_output=True, text=True, check=True)
    start()

    assert breaking.told("sim") == plain.stdout.splitlines()[-1]


@pytest.mark.campaign
def test_a_small_block_against_inductors_metrics() -> None:
    start()
    seen = watch()
    with torch.device("sim"):
        block, x = Mlp(), torch.randn(8, 64, 64, requires_grad=True)
    torch.compile(block)(x).sum().backward()

    assert [pair.is_backward for pair in seen] == [False, True]
    for expected, plan, _ in seen:
        assert (len(plan.launches), plan.nbytes) == tuple(expected)


def _into_slices(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    for row in range(0, 8, 2):
        torch.mm(x[row : row + 2], weight, out=result[row : row + 2])
    result[2:4] = x[2:4] * 2
    return result


@pytest.mark.campaign
def test_graphs_that_write_into_slices() -> None:
    """Inductor copies into a view of a fake tensor of the GPU: torch's binding asks for its guard."""
    start()
    from fsdpbench.sim.torch_device.compile.refusals import REPORT

    x, weight = torch.randn(8, 64, device="sim"), torch.randn(64, 64, device="sim")
    assert torch.compile(_into_slices, fullgraph=True)(x, weight).shape == x.shape
    (plan,) = REPORT.plans
    assert plan.launches


@pytest.mark.campaign
def test_a_second_shape_makes_one_graph_for_all_shapes() -> None:
    """As torch does it: the second shape recompiles with symbols, the third finds that graph. Its kernels
    move as many more bytes as their arguments have."""
    from fsdpbench.sim.torch_device.compile.refusals import REPORT

    simulation = start()
    with torch.device("sim"):
        block = nn.Sequential(nn.GELU(), nn.Tanh())
    compiled = torch.compile(block)
    took = {}
    for rows in (4096, 8192, 8192, 65536, 65536):  # the last of each finds its memory
        x = torch.randn(rows, 1024, device="sim")
        simulation.synchronize()
        begin = simulation.cpu_ns()
        compiled(x)
        simulation.synchronize()
        took[rows] = simulation.cpu_ns() - begin

    assert len(REPORT.plans) == 2
    assert list(REPORT.to_dict()["recompilations"].values()) == [1]
    profile = simulation.profile
    share = profile.bandwidth.efficiency["pointwise"] * profile.bandwidth.fused_gain
    bandwidth = share * profile.memory_bandwidth
    expected = (65536 - 8192) * 1024 * 4 * 2 / bandwidth * 1e9
    assert took[65536] - took[8192] == pytest.approx(expected, rel=0.02)


@pytest.mark.campaign
@pytest.mark.parametrize("system", ["fsdp2", "fsdp1", "ddp"])
def test_blocks_compile_once_under_every_wrapper(system: str) -> None:
    """No break, no recompilation, one forward and one backward for all blocks (DDP cuts by its buckets)."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from device_training import TinyGPT, wrap

    from fsdpbench.sim.torch_device.compile.refusals import REPORT

    start().init_process_group()
    with torch.device("sim"):
        network = TinyGPT()
    options = {"use_orig_params": True} if system == "fsdp1" else {}
    blocks = list(network.blocks)
    wrapped = wrap(system, network, 1, **options)
    for block in blocks:
        block.compile()
    for _ in range(3):
        wrapped(torch.randint(0, 512, (2, 128), device="sim")).backward()
        wrapped.zero_grad()

    found = REPORT.to_dict()
    assert (found["graph_breaks"], found["recompilations"], found["fallbacks"]) == ({}, {}, {})
    assert found["graphs"] == (4 if system == "ddp" else 2)


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
        unit.compile(dynamic=False)
    batch = next(iter(workload.batches(2, seq, 0, 0, torch.device("sim"))))
    with torch.autocast("sim", dtype=torch.bfloat16):
        loss = network(*batch)
    loss.backward()

    assert len({pair.is_backward for pair in seen}) == 2
    for expected, plan, _ in seen:
        assert expected.kernels
        assert (len(plan.launches), plan.nbytes) == tuple(expected)
