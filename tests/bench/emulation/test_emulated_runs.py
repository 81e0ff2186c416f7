"""`--emulate`: one real process is rank 0 of many, and says so."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdpbench.engine.emulation import init_process_group
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import load_profile

WORLD = 64
SHAPE = "layers=2,d_model=32,heads=2,vocab=64"


def emulated(fsdpbench: Any, folder: Path, system: str) -> dict[str, Any]:
    model = ["--model", "gpt", "--shape", SHAPE, "--seq", "16", "--batch", "1", "--param-dtype", "fp32"]
    where = ["--gpus", str(WORLD), "--device", "cpu", "--emulate", "--hardware", "h100-80gb"]
    done = fsdpbench("run", *model, *where, "--system", system, "-o", str(folder / system), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["status"] == "ok", result["cause"]
    return result


def test_each_fsdp_trains_as_rank_0_of_64(fsdpbench: Any, tmp_path: Path) -> None:
    results = {s: emulated(fsdpbench, tmp_path, s) for s in ("impl-fsdp2", "torch-fsdp2")}
    first = results["torch-fsdp2"]
    assert results["impl-fsdp2"]["loss"][:5] == pytest.approx(first["loss"][:5], rel=1e-5)
    for name, result in results.items():
        hardware = result["hardware"]
        assert (hardware["emulated"], hardware["simulated"]) == (True, False), name
        assert hardware["network"] == "h100-80gb"
        assert f"rank 0 of {WORLD}" in hardware["source"], name
        assert len(result["traces"]) == 1


@pytest.fixture
def group() -> Iterator[Network]:
    network = Network(load_profile("a100-80gb"), WORLD, 8)
    init_process_group(network, 0, datetime.timedelta(seconds=20))
    yield network
    dist.destroy_process_group()


def test_collectives_queue_and_take_the_networks_time(group: Network) -> None:
    whole, shard = torch.zeros(WORLD << 16), torch.ones(1 << 16)
    nbytes = whole.numel() * whole.element_size()
    started = time.perf_counter_ns()
    works = [dist.all_gather_into_tensor(whole, shard, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    took = time.perf_counter_ns() - started
    assert took >= 3 * group.collective_ns("all_gather", nbytes, range(WORLD))
    assert bool((whole == 1).all())
    neighbours = dist.new_group(list(range(8)))
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=neighbours)
    assert tensor.tolist() == [8.0] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "sim"], "a simulated one needs no other ranks"),
        (["--device", "cpu", "--hardware", "h1000"], "h1000"),
        ([], "needs one GPU"),
    ],
)
def test_bad_input(fsdpbench: Any, arguments: list[str], words: str) -> None:
    if not arguments and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = fsdpbench("run", "--model", "gpt-tiny", "--emulate", *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
