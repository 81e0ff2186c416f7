"""Memory of the device: exact, freed when storages die, out when it is full."""

from __future__ import annotations

import copy
import gc
import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.simulated
MIB = 1 << 20


def test_tensors_take_and_give_back_memory() -> None:
    from device_training import start

    start()
    tensor = torch.empty(MIB, device="sim")
    view = tensor.view(2, -1)[1]
    assert torch.sim.memory_allocated() == 4 * MIB
    del tensor
    assert torch.sim.memory_allocated() == 4 * MIB
    del view
    assert torch.sim.memory_allocated() == 0
    assert torch.sim.max_memory_allocated() == 4 * MIB
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == 0
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() == 0


def test_saved_tensors_live_until_backward() -> None:
    from device_training import start

    start()
    x = torch.ones(MIB, device="sim", requires_grad=True)
    y = (x.exp()).sum()
    held = torch.sim.memory_allocated()
    assert held > 8 * MIB
    y.backward()
    assert torch.sim.memory_allocated() == held  # the saved result is gone, the gradient has come
    x.grad = None
    assert torch.sim.memory_allocated() < held - 3 * MIB


def test_storages_are_resized() -> None:
    from device_training import start

    start()
    tensor = torch.empty(MIB, device="sim")
    storage = tensor.untyped_storage()
    assert storage.size() == storage.nbytes() == len(storage) == 4 * MIB
    assert tensor.data_ptr() == storage.data_ptr() != 0
    assert tensor[256:].data_ptr() == tensor.data_ptr() + 1024
    storage.resize_(0)
    assert torch.sim.memory_allocated() == 0
    assert tensor.data_ptr() == storage.data_ptr() == 0
    storage.resize_(8 * MIB)
    assert torch.sim.memory_allocated() == 8 * MIB


def test_out_of_memory_has_torch_s_message_and_calls_back() -> None:
    from device_training import start

    sim = start()
    heard: list[str] = []
    sim.accelerator.on_out_of_memory = heard.append
    kept = [torch.empty(16 * 1024 * MIB // 4, device="sim") for _ in range(4)]
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate 20\.00 GiB"):
        torch.empty(20 * 1024 * MIB // 4, device="sim")
    assert len(heard) == 1
    assert torch.sim.memory_stats()["num_ooms"] == 1
    del kept
    torch.empty(20 * 1024 * MIB // 4, device="sim")


def test_record_stream_keeps_memory_from_being_reused() -> None:
    from device_training import start

    start()
    side = torch.sim.Stream()
    a = torch.empty(8192, 8192, device="sim", dtype=torch.bfloat16)

    def reuses(record: bool) -> bool:
        tensor = torch.empty(64 * MIB, device="sim")
        where = tensor.data_ptr()
        with torch.sim.stream(side):
            torch.mm(a, a)
        if record:
            tensor.record_stream(side)
        del tensor
        reused = torch.empty(64 * MIB, device="sim").data_ptr() == where
        torch.sim.synchronize()
        return reused

    assert reuses(record=False)
    assert not reuses(record=True)


def test_fsdp2_returns_to_the_bytes_of_its_sharded_state() -> None:
    """Parameters and both moments in float32: 12 bytes an element; and 4 for each parameter's step count."""
    from device_training import build, start

    start()
    step = build("fsdp2", 8)
    gc.collect()
    step()
    gc.collect()
    requested = torch.sim.memory_stats()["requested_bytes.all.current"]
    from torch.distributed.tensor import DTensor

    parameters = [
        item
        for item in gc.get_objects()
        if isinstance(item, torch.nn.Parameter) and isinstance(item, DTensor)
    ]
    elements = sum(parameter.to_local().numel() for parameter in parameters)
    assert requested == 12 * elements + 4 * len(parameters)


def test_deep_copies_have_memory_of_their_own() -> None:
    from device_training import start

    start()
    layer = torch.nn.Linear(256, 256, device="sim")
    before = torch.sim.memory_allocated()
    twin = copy.deepcopy(layer)
    assert torch.sim.memory_allocated() == 2 * before
    assert twin.weight.requires_grad
    assert twin.weight.data_ptr() != layer.weight.data_ptr()


def test_checkpoint_files_load_onto_the_device(tmp_path: Path) -> None:
    from device_training import start

    start()
    layer = torch.nn.Linear(8, 8, device="sim")
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", map_location="sim")
    layer.load_state_dict(state)
    assert state["weight"].device.type == "sim"
    assert torch.load(tmp_path / "state.pt", map_location="cpu")["weight"].shape == (8, 8)


def test_flash_attention_s_workspace_is_counted() -> None:
    """Backward needs the queries' gradient in float32 besides its outputs."""
    from device_training import start

    start()
    query, key, value = (
        torch.empty(4, 16, 2048, 128, device="sim", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    grad = torch.empty_like(out)
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    out.backward(grad)
    peak = torch.sim.max_memory_allocated() - before
    gradients, wide, sums = 3 * 32 * MIB, 64 * MIB, 4 * 16 * 2048 * 4
    assert peak >= gradients + wide + sums
    assert peak < gradients + wide + sums + 4 * MIB


def test_out_of_memory_in_backward_is_heard_before_it_is_raised() -> None:
    """Hooks of backward allocate."""
    from device_training import VOCABULARY, TinyGPT, start, wrap

    heard: list[str] = []
    start().accelerator.on_out_of_memory = heard.append
    with torch.device("sim"):
        model = wrap("fsdp2", TinyGPT(width=1024), 8)
    loss = model(torch.randint(0, VOCABULARY, (2, 128), device="sim"))
    torch.sim.empty_cache()
    kept = torch.empty(torch.sim.mem_get_info()[0] - (8 << 20), device="sim", dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate"):
        loss.backward()
    assert kept.numel()
    assert "out of memory. Tried to allocate" in heard[0]


def test_a_history_is_kept_beside_a_running_trace(tmp_path: Path) -> None:
    """Both hear of every allocation; ended, the history is gone and the trace goes on."""
    from device_training import start

    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

    sim = start()
    memory = torch.sim.memory
    memory._record_memory_history()
    with sim.trace(tmp_path / "trace.json.gz") as trace:
        kept = torch.zeros(1 << 20, device="sim")
        del kept
        snapshot = memory._snapshot()
        memory._record_memory_history(enabled=None)
        torch.zeros(1 << 21, device="sim")
        trace.step()
    entries = snapshot["device_traces"][0]
    assert [entry["action"] for entry in entries if entry["size"] == 4 << 20] == [
        "alloc", "free_requested", "free_completed",
    ]  # fmt: skip
    (allocation,) = [entry for entry in entries if entry["action"] == "alloc"]
    assert allocation["frames"][0]["name"] == "test_a_history_is_kept_beside_a_running_trace"
    assert memory._snapshot()["device_traces"] == [[]]
    assert ACCELERATOR.allocator.listener is None
    memory._dump_snapshot(tmp_path / "memory.pickle")
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes())["segments"] == memory.memory_snapshot()
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    assert {4 << 20, 8 << 20} <= set(sizes)


def test_states_that_were_gathered_are_freed_with_their_optimizer() -> None:
    """torch's FSDP1 with original parameters: other ranks' follow from this one's, without holding it."""
    from device_training import TinyGPT, start, wrap
    from torch.distributed.fsdp import FullyShardedDataParallel

    def left(gathered: bool) -> int:
        start()
        with torch.device("sim"):
            model = wrap("fsdp1", TinyGPT(layers=1), 8, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        if gathered:
            FullyShardedDataParallel.optim_state_dict(model, optimizer)
        del optimizer
        model.zero_grad()
        gc.collect()
        torch.distributed.destroy_process_group()
        return int(torch.sim.memory_allocated())

    assert left(gathered=True) <= left(gathered=False)
