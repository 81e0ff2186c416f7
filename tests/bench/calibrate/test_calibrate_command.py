"""`fsdpbench calibrate` on a simulated machine finds its own profile, and says what it did not see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import HardwareProfile, load_profile, profile_names

TRUTH = load_profile("h100-80gb")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdpbench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def calibrated(
    in_forks: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HardwareProfile, dict[str, list[str]]]:
    """Eight simulated H100s, measured by somebody who knows no better base than the H200, whose kernels of
    several streams he takes for independent."""
    folder = tmp_path_factory.mktemp("calibrate")
    file, base = folder / "mine.toml", folder / "base.toml"
    base.write_text('base = "h200"\nname = "base"\n[contention]\nkernel_share = 0.0\n')
    words = ["calibrate", "--device", "sim", "--hardware", "h100-80gb", "--gpus", "8", "--quick", "--json"]
    program = "from fsdpbench.cli import main; main()"
    (done,) = in_forks(program, [[*words, "--base", str(base), "-o", str(file)]])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr.lower()
    return load_profile(file), json.loads(done.stdout)


def test_the_host_is_found_again(calibrated: tuple[HardwareProfile, dict[str, list[str]]]) -> None:
    cpu = calibrated[0].cpu
    for name in ("operator_us", "view_us", "autograd_node_us", "module_call_us", "hook_us", "event_us"):
        assert getattr(cpu, name) == pytest.approx(getattr(TRUTH.cpu, name), rel=0.02), name
    for name in ("cuda_malloc_us_per_gib", "cuda_free_us_per_gib", "collective_us"):
        assert getattr(cpu, name) == pytest.approx(getattr(TRUTH.cpu, name), rel=0.05), name


def test_kernels_cost_what_they_do(calibrated: tuple[HardwareProfile, dict[str, list[str]]]) -> None:
    found, truth = KernelCosts(calibrated[0]), KernelCosts(TRUTH)
    for kind in ("forward", "weight_grad"):
        for shape in ((4096, 11008, 4096), (8192, 5120, 5120)):
            expected = truth.gemm_ns(*shape, kind=kind)
            assert found.gemm_ns(*shape, kind=kind) == pytest.approx(expected, rel=0.08), (kind, shape)
    attention = (2, 32, 4096, 4096, 128, True)
    for name in ("attention_forward_ns", "attention_backward_ns"):
        assert getattr(found, name)(*attention) == pytest.approx(getattr(truth, name)(*attention), rel=0.05)
    for kind in TRUTH.bandwidth.efficiency:
        expected = truth.memory_bound_ns(1 << 30, kind)
        assert found.memory_bound_ns(1 << 30, kind) == pytest.approx(expected, rel=0.02), kind


def test_collectives_cost_what_they_do(calibrated: tuple[HardwareProfile, dict[str, list[str]]]) -> None:
    found, truth = Network(calibrated[0], 8, 8), Network(TRUTH, 8, 8)
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for nbytes in (1 << 24, 1 << 28):
            expected = truth.collective_ns(kind, nbytes, range(8))
            assert found.collective_ns(kind, nbytes, range(8)) == pytest.approx(expected, rel=0.05), kind


def test_kernels_of_two_streams_share_the_gpu_as_they_do(
    calibrated: tuple[HardwareProfile, dict[str, list[str]]],
) -> None:
    assert calibrated[0].contention.kernel_share == pytest.approx(TRUTH.contention.kernel_share, abs=0.02)
    assert "contention.kernel_share" in calibrated[1]["measured"]


def test_what_was_not_measured_is_marked(calibrated: tuple[HardwareProfile, dict[str, list[str]]]) -> None:
    profile, record = calibrated
    assert set(profile.estimated) == set(record["assumed"])
    assert {"gemm.tiles", "nic.gb_s_per_node", "cpu.launch_us"} <= set(profile.estimated)
    assert not set(record["assumed"]) & set(record["measured"])
    assert "a simulated NVIDIA H100" in profile.sources["gemm"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "mine.json"], "mine.json"),
        (["-o", "nowhere/mine.toml"], "nowhere"),
        (["--device", "sim", "-o", "mine.toml"], "--hardware"),
        (["--device", "sim", "--hardware", "h1000", "-o", "mine.toml"], "h1000"),
    ],
)
def test_bad_input(
    fsdpbench: Any, arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fsdpbench("calibrate", *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.campaign
@pytest.mark.parametrize("name", profile_names(), ids=lambda name: f"{name}-base")
def test_each_packaged_profile_is_a_base(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.toml"
    done = run("calibrate", "--device", "sim", "--hardware", name, "--gpus", "1", "--quick", "-o", str(file))
    assert done.returncode == 0, done.stderr[-1000:]
    capacity = load_profile(name).memory.capacity_gib
    assert load_profile(file).memory.capacity_gib == pytest.approx(capacity, rel=0.001)
