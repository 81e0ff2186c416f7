"""What a finding says: both places, stream, phase, step, FSDP unit, role, the usual mend."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = pytest.mark.simulated


def here() -> int:
    import inspect

    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_both_places_and_their_lines() -> None:
    from sanitized import matrix, start

    sanitizer = start()
    shared, side = matrix(), torch.sim.Stream()
    first = here() + 1
    shared.mul_(3)
    with torch.sim.stream(side):
        second = here() + 1
        shared.sum()
    (finding,) = sanitizer.to_dict()["findings"]
    assert finding["kind"] == "race"
    assert finding["count"] == 1
    assert finding["bytes"] == shared.nbytes
    assert finding["first"]["line"].endswith(f"test_findings.py:{first}")
    assert finding["second"]["line"].endswith(f"test_findings.py:{second}")
    assert finding["first"]["stack"][0].endswith("test_both_places_and_their_lines")
    assert (finding["first"]["operation"], finding["first"]["access"]) == ("aten::mul_", "write")
    assert (finding["second"]["operation"], finding["second"]["access"]) == ("aten::sum", "read")
    assert finding["first"]["stream"] == "stream 7 (default)"  # its number in traces
    assert "(made at " in finding["second"]["stream"]
    assert finding["first"]["phase"] == "outside the model"
    assert "wait_stream" in finding["hint"]
    json.dumps(finding)


def test_backward_names_the_line_of_forward() -> None:
    from sanitized import matrix, start

    sanitizer = start()
    side, weight = torch.sim.Stream(), matrix().requires_grad_()
    forward = here() + 1
    activation = torch.nn.functional.gelu(weight)
    activation.pow(2).sum().backward()
    with torch.sim.stream(side):
        weight.grad.sum()
    (finding,) = sanitizer.to_dict()["findings"]
    assert finding["first"]["phase"] == "backward"
    assert finding["first"]["operation"] == "aten::gelu_backward"
    assert finding["first"]["forward_line"].endswith(f"test_findings.py:{forward}")


def test_phase_step_unit_and_role_of_fsdp() -> None:
    """The race of `opt.step(); model.unshard()`, on a wrapper that does not wait."""
    from sanitized import start
    from torch.distributed.device_mesh import init_device_mesh

    from fsdpbench import impl

    sanitizer = start(with_group=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to("sim")
    mesh = init_device_mesh("sim", (8,))
    for layer in model:
        impl.fully_shard(layer, mesh=mesh)
    impl.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.randn(4, 64, device="sim")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(sanitizer.findings) == 0
    side = torch.sim.Stream()
    with torch.sim.stream(side):
        for parameter in model.parameters():
            parameter.to_local().detach().sum()
    found = [finding.to_dict() for finding in sanitizer.findings]
    assert {finding["first"]["phase"] for finding in found} == {"optimizer"}
    assert {finding["first"]["step"] for finding in found} == {1}
    assert "parameter (64 x 64)" in {finding["role"] for finding in found}
    model(torch.randn(4, 64, device="sim")).sum().backward()
    with torch.sim.stream(side):
        optimizer.step()
    later = [finding.to_dict() for finding in sanitizer.findings][len(found) :]
    assert any("FSDP::" in (finding["first"]["unit"] or "") for finding in later)


def test_roles_of_gradients_and_states() -> None:
    from sanitized import start

    sanitizer = start()
    layer, side = torch.nn.Linear(8, 4, device="sim"), torch.sim.Stream()
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(2, 8, device="sim")).sum().backward()
    optimizer.step()
    with torch.sim.stream(side):
        layer.weight.grad.mul_(2)
        optimizer.state[layer.weight]["exp_avg"].mul_(2)
    roles = {finding.role for finding in sanitizer.findings}
    assert {"gradient (4 x 8)", "optimizer state exp_avg (4 x 8)"} <= roles


def test_counts_are_by_kind_with_repetitions() -> None:
    from sanitized import matrix, start

    sanitizer = start()
    shared, side = matrix(), torch.sim.Stream()
    for _ in range(4):
        shared.add_(1)
        with torch.sim.stream(side):
            shared.add_(1)
    told = sanitizer.to_dict()
    assert told["counts"]["race"] == sum(finding["count"] for finding in told["findings"]) == 7
    assert told["counts"]["use_after_free"] == told["counts"]["read_before_ready"] == 0
    assert told["accesses"] > 8


def test_off_there_is_nothing_of_it() -> None:
    from fsdpbench.sim import Simulation, load_profile
    from fsdpbench.sim.model.allocator import CachingAllocator
    from fsdpbench.sim.model.timeline import Timeline
    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

    simulation = Simulation.start(load_profile("a100-80gb"), world_size=8, gpus_per_node=8)
    assert simulation.sanitizer is None
    assert type(ACCELERATOR.timeline) is Timeline
    assert type(ACCELERATOR.allocator) is CachingAllocator


def test_following_changes_no_time() -> None:
    from fsdpbench.sim import Simulation, load_profile

    times = []
    for sanitize in (False, True):
        simulation = Simulation.start(load_profile("a100-80gb"), 8, 8, sanitize=sanitize)
        layer = torch.nn.Linear(256, 256, device="sim")
        optimizer = torch.optim.AdamW(layer.parameters())
        for _ in range(3):
            layer(torch.randn(64, 256, device="sim")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        simulation.synchronize()
        times.append((simulation.cpu_ns(), torch.sim.memory_stats()["reserved_bytes.all.peak"]))
    assert times[0] == times[1]
