"""In a script "cuda" is the simulated device, however it is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript

DEVICES = """
import copy, pickle
device = torch.device("cuda", 0)
assert device.type == "cuda" and str(device) == "cuda:0" and repr(device) == "device(type='cuda', index=0)"
assert isinstance(device, torch.device) and torch.device(device) == device == torch.device("cuda:0")
assert torch.device(0) == device and torch.device(type="cuda", index=0) == device
assert pickle.loads(pickle.dumps(device)) == device == copy.deepcopy(device)
assert torch.device("cpu").type == "cpu" and str(torch.device("meta")) == "meta"
host = torch.ones(2, 3)
made = [
    torch.zeros(2, 3, device="cuda"), torch.ones(2, 3, device="cuda:0"), torch.full((2, 3), 1.0, device=0),
    torch.randn(2, 3, device=device), torch.tensor([[1.0] * 3] * 2, device="cuda"), host.cuda(), host.cuda(0),
    host.to("cuda"), host.to(device=device), host.to("cuda:0", torch.float32, non_blocking=True), host.to(0),
    torch.zeros_like(host, device="cuda"), host.new_zeros(2, 3, device="cuda"),
    host.type("torch.cuda.FloatTensor"), torch.as_tensor(host, device="cuda"),
    torch.empty_strided((2, 3), (3, 1), device="cuda"),
    torch.rand(2, 3, device=device, generator=torch.Generator(device="cuda").manual_seed(1)),
]
with torch.device("cuda"):
    made.append(torch.zeros(2, 3))
torch.set_default_device("cuda")
made.append(torch.zeros(2, 3))
torch.set_default_device(None)
for tensor in made:
    assert tensor.is_cuda and tensor.device == device and tensor.shape == (2, 3) and tensor.get_device() == 0
    assert tensor.dtype is torch.float32 and tensor.type() == "torch.cuda.FloatTensor"
assert not host.is_cuda and not torch.zeros(2).is_cuda and host.type() == "torch.FloatTensor"
assert "cuda:0" in str(made[0]) and made[0].untyped_storage().is_cuda
kind = torch.cuda.FloatTensor
legacy = [kind(2, 3), kind(torch.Size((2, 3))), kind([[1, 2, 3]] * 2), host.type(kind)]
torch.set_default_tensor_type("torch.cuda.FloatTensor")
legacy.append(torch.zeros(2, 3))
torch.set_default_tensor_type(torch.FloatTensor)
assert all(each.is_cuda and each.shape == (2, 3) and each.dtype is torch.float32 for each in legacy)
assert isinstance(legacy[0], kind) and not isinstance(host, kind) and not isinstance(legacy[0].long(), kind)
assert kind().shape == (0,) and torch.cuda.LongTensor([3]).item() == 3 and not torch.zeros(1).is_cuda
for each in (pickle.loads(pickle.dumps(legacy[0])), pickle.loads(pickle.dumps(torch.arange(6).cuda()))):
    assert each.is_cuda and each.numel() == 6
assert each.tolist() == [0, 1, 2, 3, 4, 5]  # known numbers stay known
module = torch.nn.Linear(2, 2).cuda()
assert next(module.parameters()).is_cuda and next(module.cpu().parameters()).device.type == "cpu"
assert next(module.to("cuda", torch.bfloat16).parameters()).dtype is torch.bfloat16
torch.device("cuda", 3)  # can be named, not used
try:
    torch.zeros(1, device="cuda:3")
except RuntimeError as error:
    assert "LOCAL_RANK" in str(error)
else:
    raise AssertionError("device 3 is not this rank's")
train(2)
"""

MODULE = """
import torch.cuda.amp, torch.cuda.memory, torch.cuda.nvtx
import os
assert torch.cuda.is_available() and torch.cuda.device_count() == 8 and torch.cuda.current_device() == 0
assert os.environ["LOCAL_WORLD_SIZE"] == "8" and os.environ["GROUP_WORLD_SIZE"] == "2"
assert "H100" in torch.cuda.get_device_name(0) and torch.cuda.get_device_capability() == (9, 0)
torch.cuda.set_per_process_memory_fraction(0.001)
assert torch.cuda.get_per_process_memory_fraction() == 0.001
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    torch.cuda.set_per_process_memory_fraction(1.0)
else:
    raise AssertionError("more than the share was given")
assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() > 90000
properties = torch.cuda.get_device_properties("cuda")
assert properties.multi_processor_count == 132 and (properties.major, properties.minor) == (9, 0)
assert torch.cuda.is_bf16_supported() and torch.cuda.is_initialized() and torch.version.cuda
torch.cuda.set_device("cuda:0"); torch.cuda.manual_seed_all(3); torch.manual_seed(1); torch.cuda.empty_cache()
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
own = torch.cuda.default_generators[torch.cuda.current_device()]
state = own.manual_seed(5).get_state()
assert isinstance(own, torch.Generator) and own.initial_seed() == torch.cuda.initial_seed() == 5
torch.cuda.manual_seed(7)
assert not torch.equal(own.get_state(), state) and own.set_state(state).initial_seed() == 5
with torch.random.fork_rng():
    torch.manual_seed(2)
before = torch.cuda.memory_allocated()
kept = torch.zeros(1 << 20, device="cuda")
assert torch.cuda.memory_allocated() - before == 4 << 20 <= torch.cuda.max_memory_allocated()
assert torch.cuda.memory.memory_reserved() >= 4 << 20 and "Allocated memory" in torch.cuda.memory_summary()
free, total = torch.cuda.mem_get_info()
assert 0 < free < total and total == properties.total_memory
assert torch.cuda.cudart().cudaMemGetInfo(0) == (free, total)
assert torch.cuda.Stream.priority_range() == (0, -3)
try:
    torch.cuda.Event(interprocess=True).ipc_handle()
except NotImplementedError as error:
    assert "ipc_handle is not simulated" in str(error)
else:
    raise AssertionError("events of other processes are not there")
side = torch.cuda.Stream(priority=-1)
begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begun.record()
with torch.cuda.stream(side), torch.cuda.nvtx.range("side"):
    assert torch.cuda.current_stream() == side
    big = torch.randn(4096, 4096, device="cuda")
    big @ big
    ended.record()
assert torch.cuda.current_stream() == torch.cuda.default_stream()
side.synchronize()
assert begun.elapsed_time(ended) > 0.4
with torch.cuda.device(0):
    torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStart()
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
assert torch.get_device_module("cuda") is torch.cuda
train(2)
"""

DISTRIBUTED = """
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
def main(rank, greeting):
    assert (rank, greeting) == (0, "hello")
    assert dist.is_nccl_available() and torch.cuda.nccl.version() > (2, 10)
    dist.init_process_group("nccl", rank=rank, world_size=16, device_id=torch.device("cuda", rank))
    assert dist.get_backend() == "nccl" and dist.get_world_size() == 16 and dist.get_rank() == 0
    on_host = dist.new_group(backend="gloo")
    assert dist.get_backend(on_host) == "gloo" and dist.get_backend(dist.new_group()) == "nccl"
    dist.monitored_barrier(on_host)
    dist.all_reduce(torch.ones(1), group=on_host)
    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    assert mesh.device_type == "cuda" and mesh["shard"].size() == 8
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value, group=mesh.get_group("replicate"))
    dist.barrier()
    assert value.sum().item() == 0 and not torch.equal(value, torch.ones(3, device="cuda"))
    gathered = [None] * 16
    dist.all_gather_object(gathered, rank)
    train(2)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, args=("hello",), nprocs=torch.cuda.device_count())
"""

AMP = """
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for context, scaler in (
    (torch.autocast("cuda", dtype=torch.bfloat16), torch.amp.GradScaler("cuda", enabled=False)),
    (torch.amp.autocast(device_type="cuda"), torch.amp.GradScaler("cuda")),
    (autocast(), GradScaler(init_scale=2.0**10)),
):
    with context:
        assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
        out = model(torch.randn(8, 64, device="cuda"))
        assert out.dtype is torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype()
        loss = out.float().square().mean()
    assert not torch.is_autocast_enabled("cuda")
    assert torch.isfinite(loss) and torch.isfinite(out).all() and loss.isfinite().item() is True
    if loss.isnan() or loss > 1e9 or torch.isinf(out).any() or (out > 0).all():
        raise SystemExit("the placeholder is zero, and finite")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
assert f"{loss:.2f} {float(loss)} {loss.tolist()}" == "0.00 0.0 0.0"
"""

LOADERS = """
import os
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(96.0).view(24, 4))
for workers in (0, 2):
    seen = 0
    for (batch,) in DataLoader(data, batch_size=8, pin_memory=True, num_workers=workers):
        assert batch.is_pinned()
        seen += len(batch.to("cuda", non_blocking=True))
    assert seen == 24
torch.save({"weight": torch.ones(3, device="cuda")}, "PATH")
for where in ("cuda", "cuda:0", torch.device("cuda", 0), "cpu"):
    loaded = torch.load("PATH", map_location=where)["weight"]
    assert loaded.device.type == torch.device(where).type and loaded.shape == (3,)
assert torch.load("PATH")["weight"].is_cuda
train(2)
"""


def test_devices_and_tensors(run_probe: RunScript) -> None:
    assert run_probe(DEVICES).result["status"] == "ok"


def test_the_cuda_module(run_probe: RunScript) -> None:
    run = run_probe(MODULE, gpus=16, hardware="h100-80gb")
    assert run.result["status"] == "ok", run.cause


def test_process_groups_and_spawned_ranks(run_probe: RunScript) -> None:
    run = run_probe(DISTRIBUTED, gpus=16)
    assert run.result["status"] == "ok", run.cause


def test_autocast_and_scalers(run_probe: RunScript) -> None:
    run = run_probe(AMP)
    assert run.result["status"] == "ok", run.cause


def test_loaders_and_files(run_probe: RunScript, tmp_path: Path) -> None:
    run = run_probe(LOADERS.replace("PATH", str(tmp_path / "weights.pt")))
    assert run.result["status"] == "ok", run.cause
    assert run.result["redirected_files"]["left_in_place"] == [], "sockets of workers"


def test_streams_and_events_of_any_device_are_those_of_cuda(run_probe: RunScript) -> None:
    """`torch.Stream` and `torch.accelerator`, as code for any device has them; memory's counters, nested."""
    run = run_probe(
        """
        made = [torch.Stream("cuda"), torch.Stream(device="cuda"), torch.Stream(torch.device("cuda"))]
        made.append(torch.Stream())
        assert len({each.stream_id for each in made}) == 4 and all(each.stream_id for each in made)
        assert all(isinstance(each, torch.cuda.Stream) for each in made)
        assert isinstance(torch.cuda.Stream(), torch.Stream) and issubclass(torch.cuda.Stream, torch.Stream)
        side, (start, end) = made[0], (torch.Event("cuda", enable_timing=True) for _ in range(2))
        assert isinstance(start, torch.Event) and isinstance(torch.cuda.Event(), torch.Event)
        x = torch.ones(1000, 1000, device="cuda")
        start.record()
        with side:
            assert torch.accelerator.current_stream() == torch.cuda.current_stream() == side
            x @ x
            end.record()
        torch.accelerator.synchronize()
        assert start.elapsed_time(end) > 0 and side.query()
        of_accelerator = [each for each in torch.accelerator.memory.__all__ if each != "get_memory_info"]
        answers = {each: getattr(torch.accelerator, each)() for each in of_accelerator}
        assert answers["memory_allocated"] == torch.cuda.memory_allocated() > 0, answers
        assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
        nested = torch.cuda.memory_stats_as_nested_dict()
        assert nested["allocated_bytes"]["all"]["current"] == torch.cuda.memory_allocated()
        assert len(str(torch.cuda.get_device_properties(0).uuid)) == 36
        try:
            torch.Stream("cuda:3")
        except RuntimeError as error:
            assert "cuda:3" in str(error), error
        else:
            raise AssertionError("a rank has one device")
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause
