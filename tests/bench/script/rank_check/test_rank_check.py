"""`run --script --check-ranks`: several ranks of a script, and what differs between them.

Scripts without a fault must raise no alarm; in each of the others one fault is planted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.requests.script_request import script_config

if TYPE_CHECKING:
    from conftest import RunScript

BEGINNING = """
import os, sys
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", local)

def network():
    return nn.Sequential(nn.Linear(65, 131), nn.ReLU(), nn.Linear(131, 65), nn.Linear(65, 7, bias=False))

def loop(model, steps=8, kind=torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.randn(4, 65, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(step, loss.item())
    return optimizer

def ddp():
    return nn.parallel.DistributedDataParallel(network().to(device), device_ids=[local])
"""

CLEAN = {
    "objects of a thread": """
import threading, time
def talk():
    for _ in range(3):
        time.sleep(0.02 * (1 + rank))
        dist.all_gather_object([None] * world, rank)
thread = threading.Thread(target=talk)
thread.start()
loop(ddp())
thread.join()
""",
    "ddp": "loop(ddp(), kind=torch.optim.SGD)",
    "torch-fsdp1": """
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = FullyShardedDataParallel(
    network(), device_id=device, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True,
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
)
loop(model)
model.clip_grad_norm_(1.0)
""",
    "torch-fsdp1-hybrid": """
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
loop(FullyShardedDataParallel(
    network(), device_id=local, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
))
""",
    "torch-fsdp2": """
from torch.distributed.fsdp import fully_shard
model = network().to(device)
for layer in model:
    if list(layer.parameters()):
        fully_shard(layer)
fully_shard(model)
loop(model)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "torch-hsdp": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
model = network().to(device)
for layer in model:
    if list(layer.parameters()):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
loop(model)
""",
    "tensor-parallel": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(65, 132), nn.Linear(132, 66)).to(device)
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
loop(model)
""",
    "impl-fsdp1": """
from fsdpbench.impl import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
loop(FullyShardedDataParallel(
    network(), device_id=torch.cuda.current_device(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
))
""",
    "impl-fsdp2": """
from fsdpbench.impl import fully_shard
model = network().to(device)
for layer in model:
    if list(layer.parameters()):
        fully_shard(layer)
fully_shard(model)
loop(model)
""",
    "checkpoints": """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
model = network().to(device)
fully_shard(model)
parts = get_state_dict(model, loop(model, steps=3))
dcp.save(dict(zip(("model", "optimizer"), parts)), checkpoint_id="step-3")
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    torch.save(whole, "whole.pt")
dist.barrier()
""",
    "saved-and-loaded": """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
assert not os.path.exists("step-3") and not os.path.exists("more.pt")
model = network().to(device)
fully_shard(model)
optimizer = loop(model, steps=3)
parts = get_state_dict(model, optimizer)
dcp.save(dict(zip(("model", "optimizer"), parts)), checkpoint_id="step-3")
if rank == 0:
    torch.save({"weight": torch.ones(3, device=device)}, "more.pt")
dist.barrier()
assert torch.load("more.pt", map_location=f"cuda:{local}")["weight"].device == device
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(state, checkpoint_id="step-3")
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
loop(model, steps=3)
""",
    "join": """
from torch.distributed.algorithms.join import Join
model = ddp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    with Join([model]):
        for step in range(3 + rank % 3):
            model(torch.randn(4, 65, device=device)).sum().backward()
            optimizer.step()
    dist.barrier()
""",
    "own-modules": """
import bz2, importlib, pathlib, tarfile
folder = pathlib.Path(f"made-{rank}")
folder.mkdir()
(folder / f"settings_{rank}.py").write_text(f"rank = {rank}")
(folder / f"package_{rank}").mkdir()
(folder / f"package_{rank}" / "__init__.py").write_text("from . import inner")
(folder / f"package_{rank}" / "inner.py").write_text("steps = 3")
sys.path.insert(0, str(folder))
importlib.invalidate_caches()
assert importlib.import_module(f"settings_{rank}").rank == rank
steps = importlib.import_module(f"package_{rank}").inner.steps
with tarfile.open(folder / "all.tar", "w") as archive:
    archive.add(folder / f"settings_{rank}.py")
with bz2.open(folder / "all.bz2", "wb") as file:
    file.write((folder / "all.tar").read_bytes())
with bz2.open(folder / "all.bz2") as packed, tarfile.open(fileobj=packed) as archive:
    assert len(archive.getnames()) == 1
for each in range(10):
    dist.barrier()
loop(ddp(), steps)
""",
    "uneven-lists": """
sizes = [3 + each for each in range(world)]
mine = torch.ones(sizes[rank], 5, device=device)
listed = [torch.ones(size, 5, device=device) for size in sizes]
dist.all_gather(listed, mine)
dist.reduce_scatter(mine, listed)
part = torch.ones(4, device=device)
dist.scatter(part, [part] * world if rank == 1 else None, src=1)
dist.gather(part, [part] * world if rank == 2 else None, dst=2)
received = torch.empty(world * (rank + 1), device=device)
splits = [each + 1 for each in range(world)]
dist.all_to_all_single(received, torch.ones(sum(splits), device=device), [rank + 1] * world, splits)
pairs, _ = dist.new_subgroups(2)
dist.all_reduce(torch.ones(2 + rank // 2, device=device), group=pairs)
loop(ddp(), kind=torch.optim.SGD)
""",
}

OBJECTS = """
config = [{"run": "a", "barriers": 3} if rank == 0 else None]
dist.broadcast_object_list(config, src=0)
for _ in range(config[0]["barriers"]):
    dist.barrier()
batches = [None] * world
dist.all_gather_object(batches, 10 + rank)
for _ in range(min(batches)):
    dist.barrier()
least = torch.tensor(20 + rank, device=device)
dist.all_reduce(least, op=dist.ReduceOp.MIN)
for _ in range(int(least.item())):
    dist.all_reduce(torch.ones(3, device=device))
mine = [None]
dist.scatter_object_list(mine, [f"part {each}" for each in range(world)] if rank == 0 else None, src=0)
assert mine[0] == f"part {rank}", mine
assert str(torch.ones(1, device="cuda").device) == f"cuda:{local}" == f"cuda:{torch.cuda.current_device()}"
assert device.index == local == torch.ones(1, device=device).get_device()
if rank == 0:
    torch.save(network().state_dict(), "model.pt")
dist.barrier()
loop(network().to(device), 3)
"""


def planted(where: str, line: str) -> str:
    return f"loop(network().to(device), 3)\nif {where}:\n    {line}\ndist.barrier()"


ONES = "torch.ones(4, device=device)"
PLANTED = {
    "order": (
        f"calls = [lambda: dist.all_reduce({ONES}), lambda: dist.broadcast({ONES}, 0)]\n"
        "for each in calls[:: 1 - 2 * (rank == 1)]:\n    each()\nloop(network().to(device), 3)",
        r"rank 1 calls broadcast\(.* where rank 0 calls all_reduce\(",
    ),
    "fewer": (
        "loop(network().to(device), 3)\nif rank != 7:\n    dist.barrier()",
        r"rank 7 never joins barrier\(",
    ),
    "size": (
        "dist.all_reduce(torch.ones(4 + (rank == 4), device=device))\nloop(network().to(device), 3)",
        r"rank 4 calls all_reduce\(5 float32, sum, group default\)",
    ),
    "dtype": (
        "dist.all_reduce(torch.ones(4, device=device, dtype=torch.float64 if rank == 1 else torch.float32))\n"
        "loop(network().to(device), 3)",
        r"rank 1 calls all_reduce\(4 float64, sum, group default\)",
    ),
    "operation": (
        f"dist.all_reduce({ONES}, op=dist.ReduceOp.MAX if rank == 7 else dist.ReduceOp.SUM)\n"
        "loop(network().to(device), 3)",
        r"rank 7 calls all_reduce\(4 float32, max, .* compute wrongly",
    ),
    "root": (
        f"dist.broadcast({ONES}, src=rank // 4 * 4)\nloop(network().to(device), 3)",
        r"rank 4 calls broadcast\(4 float32, from rank 4,",
    ),
    "group": (
        f"some = dist.new_group([0, 1, 4, 7])\ndist.all_reduce({ONES}, group=some if rank != 4 else None)\n"
        "loop(network().to(device), 3)",
        r"rank 4 never joins all_reduce\(.* group of ranks 0, 1, 4, 7\)",
    ),
    "group-making": (planted("rank < 4", "dist.new_group([0, 1, 2, 3])"), r"rank 4 never joins new_group\("),
    "logging": (
        planted("rank == 0", f"dist.all_reduce({ONES})"),
        r"rank 0 calls all_reduce\(.* calls barrier\(",
    ),
    "raises": (
        planted("rank == 7", "raise ValueError('no shard')"),
        r"rank 7 raises \(ValueError: no shard\)",
    ),
    "ends": (planted("rank == 1", "sys.exit(0)"), r"rank 1 never joins barrier\("),
    "dies": (planted("rank == 4", "os.kill(os.getpid(), 9)"), r"rank 4 dies \(.*SIGKILL"),
    "memory": (
        planted("rank == 1", "torch.ones(100 << 30, device=device)"),
        r"rank 1 runs out of memory \(CUDA out of memory. Tried to allocate 400.00 GiB.\)",
    ),
}


def test_ranks_go_by_what_collectives_gave_rank_0(
    run_probe: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # rank 0 saves a file of its own
    run = run_probe(BEGINNING + OBJECTS, check_ranks="2", to_the_end=True)
    assert run.result["status"] == "ok", run.cause
    check = run.result["rank_check"]
    assert (check["ranks"], check["difference"]) == ([0, 7], None)
    # 3 + 10 + 20 from what they were told, three of objects, the all-reduce of the least, the last barrier.
    assert check["collectives"]["calls"] == {"0": 38, "7": 38}
    assert run.result["step_time_s"] > 0


def test_a_rank_dependent_branch_is_named_with_both_lines(run_probe: RunScript) -> None:
    run = run_probe(BEGINNING + PLANTED["logging"][0], check_ranks="2")
    assert run.result["status"] == "rank_mismatch"
    difference = run.result["rank_check"]["difference"]
    assert difference["message"] in run.cause
    assert difference["kind"] == "kind"
    lines = [difference[stack][0] for stack in ("stack", "other_stack")]
    assert [line["own"] for line in lines] == [True, True]
    assert lines[0]["line"] - lines[1]["line"] == 1  # the barrier after the branch, which rank 0 takes
    assert run.result["step_time_s"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("name", CLEAN)
def test_no_alarm_for_what_is_right(
    run_probe: RunScript, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_probe(BEGINNING + CLEAN[name], check_ranks="", to_the_end=True)
    assert run.result["status"] == "ok", run.cause
    check = run.result["rank_check"]
    assert (check["ranks"], check["difference"]) == ([0, 1, 4, 7], None)
    assert min(check["collectives"]["calls"].values()) > 10


@pytest.mark.campaign
@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_is_found(run_probe: RunScript, name: str) -> None:
    text, message = PLANTED[name]
    run = run_probe(BEGINNING + text, check_ranks="", to_the_end=True)
    assert run.result["status"] == "rank_mismatch", run.cause
    assert re.search(message, run.cause), run.cause


@pytest.mark.campaign
def test_what_is_not_simulated_on_one_rank_is_no_difference_of_ranks(run_probe: RunScript) -> None:
    text = "loop(network().to(device), 3)\nif rank == 4:\n    torch.cuda.CUDAGraph()\n"
    run = run_probe(f"{BEGINNING}{text}loop(network().to(device), 9)", check_ranks="", to_the_end=True)
    assert run.result["status"] == "error", run.cause
    assert "rank 4 meets what is not simulated (NotSimulatedError: torch.cuda.CUDAGraph" in run.cause


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("rank", "cause"), [(0, "ran past 12 s: rank 0 stood at "), (4, "ran past 12 s: rank 4 does not end at ")]
)
def test_a_rank_that_does_not_end_is_stopped_and_named(run_probe: RunScript, rank: int, cause: str) -> None:
    text = f"loop(network().to(device), 3)\nwhile rank == {rank}:\n    pass"
    run = run_probe(BEGINNING + text, check_ranks="", to_the_end=True, timeout=12.0)
    assert run.result["status"] == "timeout"
    assert run.cause.startswith(cause)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"check_ranks": ""}, "--check-ranks belongs to --script"),
        ({"script": __file__, "check_ranks": "1"}, "--check-ranks 1: from 2 to the 8 ranks"),
        ({"script": __file__, "check_ranks": "9"}, "--check-ranks 9: from 2 to the 8 ranks"),
        ({"script": __file__, "check_ranks": "two"}, "--check-ranks: 'two' is not a whole number"),
        ({"script": __file__, "check_ranks": "", "gpus": "1"}, "--gpus 1 has one"),
        (
            {"script": __file__, "check_ranks": "", "device": "cpu"},
            "--device cpu: scripts run on simulated GPUs",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(options: dict[str, Any], words: str) -> None:
    if "script" in options:
        options = {**options, "script": Path(options["script"])}
    with pytest.raises(UsageError, match=re.escape(words)):
        script_config(options, ())


def test_without_the_check_the_configuration_is_as_ever() -> None:
    config = script_config({"script": Path(__file__)}, ())
    assert config is not None
    assert "check_ranks" not in config.to_dict()["script"]
    checked = script_config({"script": Path(__file__), "check_ranks": "3"}, ())
    assert checked is not None
    assert checked.script is not None
    assert type(checked).from_dict(checked.to_dict()) == checked
    assert checked.script.check_ranks == (0, 4, 7)
