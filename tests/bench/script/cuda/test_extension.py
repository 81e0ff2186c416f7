"""Functions of torch's C++ extension for CUDA are answered, or refused by name, in all builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from fsdpbench.script.cuda.cuda_module import functions
from fsdpbench.sim.torch_device.accelerator import Accelerator

if TYPE_CHECKING:
    from conftest import RunScript

_ASKED = re.compile(rb"\b_C\.(_cuda_\w+)")

PROBE = """
import torch.cuda.tunable as tunable
assert torch.cuda.get_allocator_backend() == "native"
for read, write, value in (
    (tunable.is_enabled, tunable.enable, True), (tunable.tuning_is_enabled, tunable.tuning_enable, False),
    (tunable.get_max_tuning_duration, tunable.set_max_tuning_duration, 7),
    (tunable.get_filename, tunable.set_filename, "tuned.csv"),
    (torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode, 1),
):
    assert read() != value
    write(value)
    assert read() == value
assert tunable.get_results() == []
if hasattr(torch.backends.cuda, "cublas_workspace_size"):  # from torch 2.13 on
    assert torch.backends.cuda.cublas_workspace_size(1 << 20) == 1 << 20
assert torch.cuda.can_device_access_peer(0, 1)

def pinned(*names):
    found = torch.cuda.host_memory_stats()
    assert list(found) == sorted(found)
    return [found[name] for name in names]

names = ("allocations.current", "active_requests.current", "active_bytes.peak", "active_bytes.freed")
assert pinned(*names) == [0, 0, 0, 0]
one, other = (torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2))
assert pinned(*names) == [2, 2, 8 << 20, 0]  # blocks of 4 MiB
del one
third = torch.empty(4 << 20, dtype=torch.uint8).pin_memory()  # in the block that was freed
assert pinned(*names) == [2, 2, 8 << 20, 4 << 20]
assert pinned("num_host_alloc", "host_alloc_time.count", "active_requests.allocated") == [2, 2, 3]
del third
torch.cuda.memory.reset_peak_host_memory_stats()
torch.cuda.memory.reset_accumulated_host_memory_stats()
assert pinned(*names) == [2, 1, 4 << 20, 0]
nested = torch.cuda.memory.host_memory_stats_as_nested_dict()
assert nested["allocated_bytes"] == {"current": 8 << 20, "peak": 8 << 20, "allocated": 0, "freed": 0}
side = torch.cuda.Stream()
torch.cuda._set_stream_by_id(side.stream_id, 0, side.device_type)
assert torch.cuda.current_stream() == side and torch._C._cuda_getCurrentStream(0)[0] == side.stream_id
torch.cuda.set_stream(torch.cuda.default_stream())
begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begun.record()
torch.cuda._sleep(19_800_000)
ended.record()
ended.synchronize()
assert 9 < begun.elapsed_time(ended) < 13, begun.elapsed_time(ended)  # 1.7 to 2 GHz
jitted = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")
for refused in (torch.cuda.current_blas_handle, lambda: jitted(torch.ones(2, device="cuda"))):
    try:
        refused()
    except NotImplementedError as error:
        assert "is not simulated" in str(error)
    else:
        raise AssertionError("was not refused")
train(2)
"""


def test_every_name_in_torch_is_known() -> None:
    """Torch's own code, but for its tests, calls no function that is missing."""
    root = Path(torch.__file__).parent
    asked = {
        name.decode()
        for path in root.rglob("*.py")
        if "testing" not in path.parts
        for name in _ASKED.findall(path.read_bytes())
    }
    assert len(asked) > 60
    known = functions(Accelerator())
    assert {name for name in asked if name not in known and not hasattr(torch._C, name)} == set()


def test_pinned_memory_is_counted_under_the_names_of_torchs_page() -> None:
    page, keys = str(torch.cuda.memory.host_memory_stats.__doc__), set[str]()
    for name, parts in re.findall(r'"([a-z_]+)(?:\.\{([a-z,]+)\})?"', page):
        keys |= {f"{name}.{part}" for part in parts.split(",")} if parts else {name}
    for name in ("current", "peak", "allocated", "freed"):  # explained by themselves, below the keys
        keys.discard(name)
    if not keys:
        pytest.skip("this torch's page names none")
    nested = functions(Accelerator())["_cuda_hostMemoryStats"]()
    found = {
        f"{name}.{part}" if part else name
        for name, value in nested.items()
        for part in (value if isinstance(value, dict) else [""])
    }
    assert found == keys


def test_answers_and_refusals(run_probe: RunScript) -> None:
    run = run_probe(PROBE, hardware="h100-80gb")
    assert run.result["status"] == "ok", run.cause
