"""A simulated trace says of its operators' inputs what torch's profiler says of the same program on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.simulated

CASES = [("linear", "foreach"), ("odds", "loop")]
MODELS = ("linear", "convolutions", "odds", "half", "autocast")
EACH = [(model, optimizer) for model in MODELS for optimizer in ("foreach", "fused", "loop", "momentum")]


def compare(cases: list[tuple[str, str]], folder: Path) -> None:
    """Every operator that both traces have is called with the same inputs."""
    from device_training import start
    from real_and_simulated import calls_in, simulated_calls, step_of
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    sim = start(1)
    compared = 0
    for case in cases:
        real = step_of(*case, "cpu")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            real()
        profiler.export_chrome_trace(str(folder / "real.json"))
        found, wanted = simulated_calls(sim, step_of(*case, "sim"), folder), calls_in(folder / "real.json")
        both = found.keys() & wanted.keys()
        assert len(both) > 12
        for name in sorted(both):
            assert found[name] <= wanted[name], (case, name, found[name] - wanted[name], wanted[name])
            compared += len(found[name])
    assert compared > 40 * len(cases)


def test_operators_have_the_inputs_that_torchs_profiler_records(tmp_path: Path) -> None:
    compare(CASES, tmp_path)


@pytest.mark.campaign
def test_operators_of_every_model_and_optimizer_do(tmp_path: Path) -> None:
    compare(EACH, tmp_path)


def test_collectives_have_the_inputs_that_torchs_profiler_records(tmp_path: Path) -> None:
    """Their schemas, as gloo's trace has them."""
    from device_training import start
    from real_and_simulated import simulated_calls
    from torch import distributed as dist

    sim = start(2)
    a, b = torch.zeros(8, device="sim"), torch.zeros(16, dtype=torch.float32, device="sim")

    def step() -> None:
        dist.all_gather_into_tensor(b, a)
        dist.reduce_scatter_tensor(a, b, async_op=True).wait()
        dist.all_reduce(a)
        dist.broadcast(a, 1)
        dist.all_to_all_single(a, a.clone())
        dist.barrier()

    found = simulated_calls(sim, step, tmp_path)
    told = {name: json.loads(*calls) for name, calls in found.items() if name.startswith("c10d::")}
    sizes = {name: call["Input Dims"] for name, call in told.items()}
    assert sizes == {
        "c10d::_allgather_base_": [[16], [8], [], [], []],
        "c10d::_reduce_scatter_base_": [[8], [16], [], [], [], []],
        "c10d::allreduce_": [[[8]], [], [], [], [], []],
        "c10d::broadcast_": [[[8]], [], [], [], [], []],
        "c10d::alltoall_base_": [[8], [8], [], [], [], [], []],
        "c10d::barrier": [[], [], [], [], []],
    }
    values = {name: "|".join(call["Concrete Inputs"]) for name, call in told.items()}
    assert values == {
        "c10d::_allgather_base_": "|||False|-1",
        "c10d::_reduce_scatter_base_": "||||True|-1",
        "c10d::allreduce_": "||||False|-1",
        "c10d::broadcast_": "||1|0|False|-1",
        "c10d::alltoall_base_": "|||[]|[]|False|-1",
        "c10d::barrier": "||[]|False|-1",
    }
    assert told["c10d::allreduce_"]["Input type"] == ["TensorList", "", "", "", "Scalar", "Scalar"]
    assert told["c10d::broadcast_"]["Input type"] == ["TensorList", "", *["Scalar"] * 4]


def test_numbers_that_plans_do_not_depend_on_are_each_calls_own(tmp_path: Path) -> None:
    from device_training import start
    from real_and_simulated import simulated_calls

    sim = start(1)
    x, many = torch.zeros(4, device="sim"), [torch.zeros(4, device="sim")]

    def step() -> None:
        for number in (0.5, 2.0):
            torch.clamp(x, min=number)
            torch._foreach_mul(many, number)
            torch._foreach_mul(many, [number])

    found = simulated_calls(sim, step, tmp_path)
    assert len(found["aten::clamp"]) == 2
    assert len(found["aten::_foreach_mul"]) == 4
