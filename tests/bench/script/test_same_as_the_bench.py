"""A script that does what the bench's worker does is measured alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fsdpbench.base.settings import Settings
from fsdpbench.cli.requests.request import target_of
from fsdpbench.sweep.planning import make_config, without_absent

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import RunScript

    from fsdpbench.launch.pool import PointPool

SCRIPT = """
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from fsdpbench.workloads import get_workload

dist.init_process_group("nccl")
device = torch.device("cuda", 0)
workload = get_workload("gpt-125m", shape={"layers": 4})
with torch.device("meta"):
    model = workload.build()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in model.modules():
    if isinstance(module, workload.block_classes):
        fully_shard(module, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
batches = workload.batches(2, workload.default_seq, 0, 0, device, data=None, world_size=8)
for step in range(8):
    model(*next(batches)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def test_times_memory_and_communication(run_probe: RunScript, pool: PointPool, tmp_path: Path) -> None:
    script = run_probe(SCRIPT).result
    assert script["status"] == "ok"
    target, _ = target_of({"model": "gpt-125m", "shape": "layers=4", "device": "sim", "gpus": "8"})
    settings = Settings.of(batch="2", reduce_dtype="fp32")
    config = without_absent(make_config(target, "torch-fsdp2", settings, target.workload()))
    pool.start(config, tmp_path)
    ended: list[Any] = []
    while pool.running:
        ended += pool.finished(1.0)
    bench = ended[0][2].to_dict()
    assert bench["status"] == "ok"
    # The bench waits for the device after each step; the script runs on.
    assert script["step_time_s"] == pytest.approx(bench["step_time_s"], rel=2e-3)
    for part in ("compute_only", "overlapped", "exposed_communication"):
        assert script["time_s"][part] == pytest.approx(bench["time_s"][part], rel=1e-3)
    for kind in ("all_gather", "reduce_scatter"):
        ours, theirs = script["communication"][kind], bench["communication"][kind]
        assert (ours["count"], ours["bytes"]) == (theirs["count"], theirs["bytes"])
    peaks = bench["peak_memory_bytes"]
    assert script["peak_memory_bytes"]["allocated"] == pytest.approx(peaks["allocated"], rel=1e-3)
    assert script["peak_memory_bytes"]["reserved"] == peaks["reserved"]
    # Counted by launches: flash attention's backward computes the scores once more than the formula.
    assert 1.0 < script["tflops_per_gpu"] / bench["tflops_per_gpu"] < 1.05
