"""Gathers by copy engines: beside computation they cost nothing; where there are none, refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

pytestmark = pytest.mark.simulated


def start(hardware: str, ranks: int = 8) -> None:
    from fsdpbench.sim import Simulation, load_profile

    Simulation.start(load_profile(hardware), ranks, 8).init_process_group()


def beside_a_product(hardware: str, ranks: int, monkeypatch: pytest.MonkeyPatch, policy: str) -> int:
    """Nanoseconds of a product with a gather into symmetric memory beside it."""
    monkeypatch.setenv("NCCL_CTA_POLICY", policy)
    start(hardware, ranks)
    symmetric.set_backend("NCCL")
    with torch.sim.use_mem_pool(symmetric.get_mem_pool(torch.device("sim"))):
        full = torch.empty(1 << 30, device="sim", dtype=torch.bfloat16)
    symmetric.rendezvous(full, dist.group.WORLD.group_name)
    matrix = torch.empty(8192, 8192, device="sim", dtype=torch.bfloat16)
    torch.sim.synchronize()
    begin, end = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    work = dist.all_gather_into_tensor(full, full[: full.numel() // ranks], async_op=True)
    begin.record()
    matrix @ matrix
    end.record()
    work.wait()
    torch.sim.synchronize()
    dist.destroy_process_group()
    return round(begin.elapsed_time(end) * 1e6)


def test_copy_engines_do_not_slow_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        beside_a_product("h100-80gb", ranks, monkeypatch, policy)
        for ranks, policy in ((8, "2"), (8, "0"), (16, "2"))
    ]
    assert found[0] < 0.95 * found[1]  # without the policy kernels gather
    assert found[0] < found[2]  # and so they do between nodes


def test_gpus_without_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a100-80gb has no all-gathers by copy engines"):
        beside_a_product("a100-80gb", 8, monkeypatch, "2")


def test_other_uses_are_refused_by_name() -> None:
    start("h100-80gb")
    with pytest.raises(NotImplementedError, match="symmetric memory of NVSHMEM is not simulated"):
        symmetric.set_backend("NVSHMEM")
    with pytest.raises(NotImplementedError, match="use_mem_pool is not simulated"):
        torch.sim.use_mem_pool(object())
    meeting = symmetric.rendezvous(torch.empty(8, device="sim"), dist.group.WORLD.group_name)
    with pytest.raises(NotImplementedError, match="`get_buffer`"):
        meeting.get_buffer(0, (8,), torch.float32)
