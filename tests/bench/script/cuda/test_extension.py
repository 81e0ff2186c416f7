"""Functions of torch's C++ extension for CUDA are answered, or refused by name, in all builds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

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
assert torch.cuda.host_memory_stats() == {} and torch.cuda.can_device_access_peer(0, 1)
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


def test_answers_and_refusals(run_probe: RunScript) -> None:
    run = run_probe(PROBE, hardware="h100-80gb")
    assert run.result["status"] == "ok", run.cause
