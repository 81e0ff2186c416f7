"""Starting simulations: what is refused, and starting anew in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 8), "world_size 0"), ((8, 0), "gpus_per_node 0"), ((8, 8, 8), "rank 8 is not in a world of 8")],
    ids=str,
)
def test_impossible_worlds_are_refused(arguments: tuple[int, ...], message: str) -> None:
    from fsdpbench.sim import Simulation, load_profile

    with pytest.raises(ValueError, match=message):
        Simulation.start(load_profile("a100-80gb"), *arguments)


@pytest.mark.parametrize("function", ["memory_stats", "synchronize", "current_stream", "empty_cache"])
def test_the_device_module_says_that_nothing_was_started(function: str) -> None:
    with pytest.raises(RuntimeError, match=r"Simulation\.start"):
        getattr(torch.sim, function)()
    assert not torch.sim.is_initialized()


def test_a_second_start_is_a_fresh_device() -> None:
    """Memory of the first is given back to the first."""
    from fsdpbench.sim import Simulation, load_profile

    first = Simulation.start(load_profile("a100-80gb"), 8, 8)
    old = torch.empty(1 << 20, device="sim")
    torch.mm(old.view(1024, 1024), old.view(1024, 1024))
    first.synchronize()
    second = Simulation.start(load_profile("h100-80gb"), 16, 8)
    assert second.cpu_ns() == 0
    assert torch.sim.memory_allocated() == 0
    del old
    assert torch.sim.memory_allocated() == 0
    torch.empty(1 << 20, device="sim")
    assert torch.sim.get_device_properties().total_memory == second.profile.memory_bytes
    assert "H100" in torch.sim.get_device_name()


def test_each_profile_has_its_gpu_s_compute_capability() -> None:
    """Those of NVIDIA's table (CUDA GPU Compute Capability); gfx942 of AMD's is 9.4 in torch."""
    from fsdpbench.sim import Simulation, load_profile, profile_names

    known = {
        **dict.fromkeys(("a100-40gb", "a100-64gb", "a100-80gb", "a100-80gb-roce2000", "a800-80gb"), (8, 0)),
        "rtx-3090": (8, 6),
        **dict.fromkeys(("l40s", "rtx-4090"), (8, 9)),
        **dict.fromkeys(("gh200-96gb", "h100-64gb", "h100-80gb", "h100-96gb", "h100-96gb-hbm2e"), (9, 0)),
        **dict.fromkeys(("h100-80gb-cuda13", "h20-96gb", "h200", "h800-80gb"), (9, 0)),
        "mi300x": (9, 4),
        **dict.fromkeys(("b200", "gb200"), (10, 0)),
        **dict.fromkeys(("b300", "gb300"), (10, 3)),
        "rtx-pro-6000": (12, 0),
    }
    found = {}
    for name in profile_names():
        Simulation.start(load_profile(name), 1, 1)
        found[name] = torch.sim.get_device_capability()
        properties = torch.sim.get_device_properties()
        assert (properties.major, properties.minor) == found[name]
    assert found == known


def test_a_faster_gpu_is_faster() -> None:
    from fsdpbench.sim import Simulation, load_profile

    durations = []
    for name in ("a100-80gb", "h100-80gb"):
        sim = Simulation.start(load_profile(name), 1, 1)
        a = torch.empty(8192, 8192, device="sim", dtype=torch.bfloat16)
        for _ in range(4):
            torch.mm(a, a)
        sim.synchronize()
        durations.append(sim.cpu_ns())
    assert durations[0] > 1.8 * durations[1]


def test_allocator_settings_come_from_the_environment() -> None:
    import os

    from fsdpbench.sim import Simulation, load_profile

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "roundup_power2_divisions:2"
    Simulation.start(load_profile("a100-80gb"), 1, 1)
    kept = torch.empty(5 << 20, device="sim", dtype=torch.uint8)
    assert torch.sim.memory_allocated() == 6 << 20
    del kept
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size:1"
    with pytest.raises(ValueError, match="max_split_size_mb"):
        Simulation.start(load_profile("a100-80gb"), 1, 1)


def test_importing_the_package_is_light() -> None:
    """torch comes with `Simulation`, not with the profiles."""
    code = "import sys, fsdpbench.sim; fsdpbench.sim.profile_names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cpu_time_is_charged_for_modules_and_hooks() -> None:
    from device_training import start

    sim = start()
    costs = sim.profile.cpu

    def call_ns(module: torch.nn.Module) -> int:
        before = sim.cpu_ns()
        module(1)
        return sim.cpu_ns() - before

    module = torch.nn.Identity()
    assert call_ns(module) == round(costs.module_call_us * 1000)
    module.register_forward_hook(lambda *args: None)
    assert call_ns(module) == round((costs.module_call_us + costs.hook_us) * 1000)


def test_registering_alone_leaves_torch_as_it_was() -> None:
    """Workers for other devices are forked from a process that has registered this one."""
    assert torch.nn.Module.__call__.__module__ == "torch.nn.modules.module"
    assert torch.profiler.record_function.__enter__.__module__ == "torch.autograd.profiler"
    from device_training import start

    start()
    assert torch.nn.Module.__call__.__module__ == "fsdpbench.sim.torch_device.patches.torch_patches"
