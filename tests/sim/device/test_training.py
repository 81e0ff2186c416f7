"""PyTorch's own FSDP2, FSDP1 and DDP train unchanged on the simulated device."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.simulated
SYSTEMS = ["fsdp2", "fsdp1", "ddp"]


@pytest.mark.plain_cases("fsdp2")
@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_repeat_exactly(system: str) -> None:
    """Time, launches and memory of a step are the same from the second (DDP: third) step on."""
    from device_training import build, start

    sim = start()
    step = build(system, 8)
    gc.collect()
    gc.disable()
    observed = []
    for _ in range(5):
        began, launched = sim.cpu_ns(), sim.accelerator.operators_launched
        step()
        sim.synchronize()
        stats = torch.sim.memory_stats()
        observed.append(
            (
                sim.cpu_ns() - began,
                sim.accelerator.operators_launched - launched,
                stats["allocated_bytes.all.current"],
                stats["reserved_bytes.all.current"],
            )
        )
    assert observed[3] == observed[4], observed
    assert observed[3][0] > 100_000
    assert sim.unknown_operators == {}


@pytest.mark.parametrize(
    "system", ["fsdp2", *(pytest.param(s, marks=pytest.mark.campaign) for s in SYSTEMS[1:])]
)
def test_two_processes_agree_to_the_byte(system: str, tmp_path: Path) -> None:
    """Trace, memory counters and clock of two runs are identical."""
    from device_training import build, in_new_process, start

    def run(name: str) -> tuple[str, dict[str, int], int]:
        sim = start()
        step = build(system, 8, {"checkpointing": True})
        step()
        with sim.trace(tmp_path / name) as trace:
            for _ in range(2):
                step()
                sim.synchronize()
                trace.step()
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        return digest, dict(torch.sim.memory_stats()), sim.cpu_ns()

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = in_new_process(lambda: run("a/rank0_trace.json.gz"))
    second = in_new_process(lambda: run("b/rank0_trace.json.gz"))
    assert first == second


@pytest.mark.plain_cases("fsdp1")
@pytest.mark.parametrize("system", SYSTEMS)
def test_tracing_changes_no_time(system: str, tmp_path: Path) -> None:
    """A traced step takes as long as an untraced one."""
    from device_training import build, start

    sim = start()
    step = build(system, 8)
    gc.collect()
    gc.disable()
    durations = []
    for _ in range(4):
        began = sim.cpu_ns()
        step()
        sim.synchronize()
        durations.append(sim.cpu_ns() - began)
    with sim.trace(tmp_path / "rank0_trace.json.gz"):
        began = sim.cpu_ns()
        step()
        sim.synchronize()
        durations.append(sim.cpu_ns() - began)
    assert durations[-1] == durations[-2], durations


def test_work_does_not_grow_with_the_number_of_gpus() -> None:
    """The same operators run on 8 and on 512 GPUs."""
    from device_training import build, in_new_process, start

    def run(world_size: int) -> int:
        sim = start(world_size)
        step = build("fsdp2", world_size)
        step()
        before = sim.accelerator.operators_launched
        step()
        return sim.accelerator.operators_launched - before

    assert in_new_process(lambda: run(8)) == in_new_process(lambda: run(512))


def test_rate_limiter_of_fsdp1_saves_reserved_memory() -> None:
    """Without `limit_all_gathers` the CPU runs ahead and FSDP1 takes more memory, as on GPUs."""
    from device_training import build, in_new_process, start

    def reserved(limit: bool) -> int:
        start()
        model = {"layers": 12, "width": 2048, "checkpointing": True}
        step = build("fsdp1", 8, model, (8, 512), limit_all_gathers=limit)
        torch.sim.reset_peak_memory_stats()
        for _ in range(2):
            step()
        return torch.sim.memory_stats()["reserved_bytes.all.peak"]

    unlimited, limited = in_new_process(lambda: reserved(False)), in_new_process(lambda: reserved(True))
    gathered_unit = 12 * 2048**2 * 2
    assert unlimited > limited + 2 * gathered_unit, (unlimited, limited)


def test_hybrid_sharding_on_a_two_dimensional_mesh() -> None:
    """FSDP2 on a (replicate, shard) mesh: reduce-scatter inside nodes, all-reduce between them."""
    from device_training import VOCABULARY, TinyGPT, start
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sim = start(32)
    mesh = init_device_mesh("sim", (4, 8), mesh_dim_names=("replicate", "shard"))
    with torch.device("sim"):
        model = TinyGPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.randint(0, VOCABULARY, (2, 128), device="sim")).backward()
    sim.synchronize()
    total = sum(parameter.numel() for parameter in model.parameters())
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert local * 8 == total


@pytest.mark.plain_cases("True")
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_clipped_and_scaled(fused: bool) -> None:
    """clip_grad_norm_ over DTensors, gradient accumulation and GradScaler run."""
    from device_training import VOCABULARY, TinyGPT, start, wrap

    sim = start()
    with torch.device("sim"):
        model = wrap("fsdp2", TinyGPT(), 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
    scaler = torch.amp.GradScaler("sim")
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        scaler.scale(model(torch.randint(0, VOCABULARY, (2, 128), device="sim"))).backward()
        model.set_requires_gradient_sync(True)
        scaler.scale(model(torch.randint(0, VOCABULARY, (2, 128), device="sim"))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert sim.unknown_operators == {}


def test_the_sharding_shortcut_answers_as_torch_does() -> None:
    """In-place optimizer operators over DTensors: no output, no redistribution; others are left to torch."""
    from device_training import start
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._op_schema import OpSchema

    from fsdpbench.sim.torch_device.patches.dtensor import runs_on_local_shards

    start()
    mesh = init_device_mesh("sim", (8,))

    def specs(*placements: object) -> list[object]:
        local = torch.empty(4, 4, device="sim")
        return [DTensor.from_local(local, mesh, [placement])._spec for placement in placements]

    propagator = DTensor._op_dispatcher.sharding_propagator
    torch_s_own = type(propagator).propagate_op_sharding_non_cached
    add_, norm = torch.ops.aten._foreach_add_.List, torch.ops.aten._foreach_norm.Scalar
    agreeing = OpSchema(add_, (specs(Shard(0), Replicate()), specs(Shard(0), Replicate())), {})
    assert runs_on_local_shards(agreeing)
    answer, expected = propagator.propagate_op_sharding(agreeing), torch_s_own(propagator, agreeing)
    assert answer.output_spec is expected.output_spec is None
    assert answer.needs_redistribute is expected.needs_redistribute is False
    assert not runs_on_local_shards(OpSchema(add_, (specs(Shard(0)), specs(Replicate())), {}))
    assert not runs_on_local_shards(OpSchema(norm, (specs(Shard(0)),), {}))


def test_the_shortcut_knows_the_geometry_that_torch_finds_out() -> None:
    """On fake tensors; what it does not know is left to torch."""
    from device_training import start
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._op_schema import OpSchema

    from fsdpbench.sim.torch_device.patches.dtensor import geometry_of_output

    start()
    mesh = init_device_mesh("sim", (8,))
    propagator = DTensor._op_dispatcher.sharding_propagator
    torch_s_own = type(propagator)._propagate_tensor_meta_non_cached
    aten = torch.ops.aten

    def schema(operator: object, transposed: bool = False, **options: object) -> OpSchema:
        local = torch.empty(4, 6, dtype=torch.bfloat16, device="sim")
        given = DTensor.from_local(local.t() if transposed else local, mesh, [Shard(0)])
        return OpSchema(operator, (given._spec,), options)

    alike = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default)
    for known in (
        schema(aten.detach.default),
        schema(aten.detach.default, transposed=True),
        *(schema(operator) for operator in alike),
        *(schema(operator, dtype=torch.float32, pin_memory=False) for operator in alike),
        *(schema(operator, memory_format=torch.preserve_format) for operator in alike),
    ):
        assert geometry_of_output(known) == torch_s_own(propagator, known)
    for unknown in (
        schema(aten.zeros_like.default, transposed=True),
        schema(aten.zeros_like.default, memory_format=torch.contiguous_format),
        schema(aten.neg.default),
    ):
        assert geometry_of_output(unknown) is None
        assert propagator._propagate_tensor_meta_non_cached(unknown) == torch_s_own(propagator, unknown)


def test_a_model_on_the_host_is_moved_by_fsdp1() -> None:
    """`device_id` and `sync_module_states`: parameters are moved by assigning their data."""
    from device_training import VOCABULARY, TinyGPT, start, wrap

    start()
    model = wrap("fsdp1", TinyGPT(), 8, sync_module_states=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"sim"}
    model(torch.randint(0, VOCABULARY, (2, 128), device="sim")).backward()


def test_cpu_offload_of_fsdp2_runs() -> None:
    from device_training import VOCABULARY, TinyGPT, start, wrap
    from torch.distributed.fsdp import CPUOffloadPolicy

    sim = start()
    with torch.device("sim"):
        model = wrap("fsdp2", TinyGPT(), 8, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randint(0, VOCABULARY, (2, 128), device="sim")).backward()
        optimizer.step()
        optimizer.zero_grad()
    sim.synchronize()
    gc.collect()
    assert torch.sim.memory_allocated() == 0, "everything is on the host between steps"


@pytest.mark.plain_cases("True")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_cpu_offload_of_fsdp1_keeps_hooks_and_gradients_on_both_sides(use_orig_params: bool) -> None:
    """Parameters go up for computing and down again; every step reduces every unit's gradient."""
    from device_training import VOCABULARY, TinyGPT, start, wrap
    from torch.distributed.fsdp import CPUOffload

    sim = start()
    model = wrap(
        "fsdp1",
        TinyGPT(),
        8,
        cpu_offload=CPUOffload(offload_params=True),
        use_orig_params=use_orig_params,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    launched = []
    for _ in range(4):
        before = sim.accelerator.operators_launched
        model(torch.randint(0, VOCABULARY, (2, 128), device="sim")).backward()
        held = [parameter for parameter in model.parameters() if parameter.numel()]
        assert held
        for parameter in held:
            assert parameter.device.type == "cpu"
            assert parameter.grad is not None
            assert parameter.grad.device.type == "cpu"
        optimizer.step()
        optimizer.zero_grad()
        launched.append(sim.accelerator.operators_launched - before)
    sim.synchronize()
    gc.collect()
    assert launched[2] == launched[3] > 100
    assert torch.sim.memory_allocated() == 0, "everything is on the host between steps"


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_ddp_s_unused_parameters_have_no_gradient(option: str) -> None:
    from device_training import start

    start()
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)).to("sim")

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, route: int) -> dict[str, Any]:
            return {"result": self.layers[route](x), "beside": [x.sum()]}

    model = torch.nn.parallel.DistributedDataParallel(Routed(), **{option: True})
    for route in (0, 0, 1) if option == "find_unused_parameters" else (0, 0):
        model(torch.ones(2, 8, device="sim"), route)["result"].sum().backward()
        assert [layer.weight.grad is not None for layer in layers] == [i == route for i in range(3)]
        model.zero_grad()
    if option == "static_graph":
        model(torch.ones(2, 8, device="sim"), 1)["result"].sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(torch.ones(2, 8, device="sim"), 1)


@pytest.mark.plain_cases("4")
@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"reshard_after_forward": 4}], ids=str)
def test_fsdp2_s_settings_run(options: dict[str, object]) -> None:
    from device_training import build, start

    sim = start()
    step = build("fsdp2", 8, **options)
    for _ in range(2):
        step()
    sim.synchronize()
    assert sim.unknown_operators == {}


@pytest.mark.plain_cases("_HYBRID_SHARD_ZERO2", "NO_SHARD")
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_fsdp1_s_strategies_run(strategy: str) -> None:
    from device_training import build, start
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy

    sim = start(16)
    options: dict[str, object] = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    if "HYBRID" in strategy:
        options["device_mesh"] = init_device_mesh("sim", (2, 8), mesh_dim_names=("replicate", "shard"))
    step = build("fsdp1", 16, **options)
    for _ in range(2):
        step()
    sim.synchronize()
    assert sim.unknown_operators == {}
