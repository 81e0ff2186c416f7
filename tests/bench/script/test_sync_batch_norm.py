"""`SyncBatchNorm` in a DDP script: its collectives, its memory, and the CPU's waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript

VISION = """
import sys
import torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
    torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.Flatten(),
    torch.nn.Linear(64 * 32 * 32, 10),
).cuda()
if sys.argv[1] == "sync":
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
images = torch.randn(16, 3, 32, 32, device="cuda")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(7):
    loss = torch.nn.functional.cross_entropy(model(images), torch.zeros(16, dtype=torch.long, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_it_gathers_statistics_and_sums_gradients(run_probe: RunScript) -> None:
    runs = {kind: run_probe(VISION, kind) for kind in ("sync", "own")}
    for kind, run in runs.items():
        assert run.result["status"] == "ok", (kind, run.cause)
        assert run.result["unknown_operators"] == {}
    counts = {
        kind: {name: figures["count"] for name, figures in run.result["communication"].items()}
        for kind, run in runs.items()
    }
    own, sync = counts["own"], counts["sync"]
    assert sync["all_gather"] - own.get("all_gather", 0) == 2  # mean, deviation and count of each layer
    assert sync["all_reduce"] - own["all_reduce"] == 2
    assert runs["sync"].result["step_time_s"] > runs["own"].result["step_time_s"]
