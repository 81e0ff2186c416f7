"""Pipelines on simulated GPUs: their times against a model of the schedule, the messages of torch's schedules
against real gloo ranks, memory by stage, and the errors of programs that would hang."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import load_profile

if TYPE_CHECKING:
    from conftest import RunScript, ScriptRun

SCHEDULES = Path(__file__).with_name("pipeline_schedules.py")
BY_HAND = """
import torch
import torch.distributed as dist
from torch import nn

MICROBATCHES, ROWS, WIDTH, LAYERS = {}, 4096, 4096, 8
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
weights = [torch.empty(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.1)
optimizer.param_groups[0]["params"][0].grad = torch.zeros(1, device="cuda")
buffer = torch.empty(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)

def stage(source, target):
    x = buffer
    if 0 <= source < world:
        dist.recv(x, source)
    for weight in weights:
        x = x @ weight
    if 0 <= target < world:
        dist.send(x, target)

for step in range(8):
    for _ in range(MICROBATCHES):
        stage(rank - 1, rank + 1)
    for _ in range(MICROBATCHES):
        stage(rank + 1, rank - 1)
    optimizer.step()
"""
"""GPipe by hand: of each stage, backward takes as long as forward, and nothing overlaps."""
BYTES = 4096 * 4096 * 2


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def kernels(run: ScriptRun, rank: int) -> list[dict[str, Any]]:
    """Return the kernels of a rank's traced steps."""
    with gzip.open(run.folder / "trace" / f"rank{rank}_trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    return [each for each in events if each.get("cat") == "kernel"]


def step_of_gpipe(stages: int, microbatches: int, compute: float, message: float, between: float) -> float:
    """Return a step's time in the long run: a stage computes, then gives to the next, which waits for it."""
    free, ends = [0.0] * stages, []
    for _ in range(6):
        for order in (range(stages), range(stages - 1, -1, -1)):
            sent = [[0.0] * microbatches for _ in range(stages)]
            for number in range(microbatches):
                for place, stage in enumerate(order):
                    if place:
                        giver = order[place - 1]
                        start = max(free[stage], sent[giver][number])
                        free[stage] = start + message
                        free[giver] = max(free[giver], free[stage])
                    free[stage] += compute
                    sent[stage][number] = free[stage]
        free = [each + between for each in free]
        ends.append(free[0])
    return ends[-1] - ends[-2]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), pytest.param(4, 8, marks=pytest.mark.campaign)])
def test_gpipe_takes_as_long_as_computed(
    stages: int, microbatches: int, run_script: RunScript, tmp_path: Path
) -> None:
    run = run_script(write(tmp_path, BY_HAND.format(microbatches)), gpus=stages)
    assert run.result["status"] == "ok", run.cause
    assert (
        f"{stages} ranks ran, as stages of a pipeline; reserved at the peak: rank 0 0.3 GiB"
        in run.result["script"]["notes"][-1]
    )
    products = [each["dur"] for each in kernels(run, 0) if "gemm" in each["name"]]
    assert len(products) == 2 * 2 * microbatches * 8  # of two traced steps
    compute = 8 * sum(products) / len(products)
    message = Network(load_profile("a100-80gb"), stages, 8).collective_ns("send_recv", BYTES, (0, 1)) / 1e3
    computed = step_of_gpipe(stages, microbatches, compute, message, 3.0)
    assert run.result["step_time_s"] * 1e6 == pytest.approx(computed, rel=0.005)
    # What a textbook says, if messages took no time.
    bubble = 1 - 2 * microbatches * compute / computed
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=0.08)
    for rank in range(stages):
        record = json.loads((run.folder / "trace" / f"rank{rank}_record.json").read_text())
        assert record["step_times_s"] == pytest.approx([run.result["step_time_s"]] * 3, rel=1e-3)
        busy = sum(each["dur"] for each in kernels(run, rank) if "nccl" not in each["name"])
        assert busy / (2e6 * run.result["traced_step_time_s"]) == pytest.approx(1 - bubble, abs=0.03)


def test_a_pipeline_that_would_hang_is_named(run_script: RunScript, tmp_path: Path) -> None:
    text = """
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    other = 1 - dist.get_rank()
    dist.send(torch.zeros(8, device="cuda"), other)
    dist.recv(torch.zeros(8, device="cuda"), other)
    torch.cuda.synchronize()
    """
    run = run_script(write(tmp_path, "\n".join(map(str.strip, text.splitlines()))), gpus=2)
    assert run.result["status"] == "error"
    assert "real ranks would hang here: rank 0 waits for rank 1: send of Float [8] to rank 1" in run.cause


def posted(output: str) -> list[str]:
    """Return the messages of the second step in what a rank printed."""
    return [line for line in output.split("step 1\n")[1].split("step 2")[0].splitlines() if "message" in line]


@pytest.mark.campaign
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS",
        "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV",
    ],
)  # fmt: skip
def test_schedules_post_the_messages_of_real_ranks(
    name: str, replicas: int, run_script: RunScript, tmp_path: Path
) -> None:
    arguments = [name, "4", str(replicas), "16", *["dynamic"] * (replicas > 1)]
    run = run_script(SCHEDULES, *arguments, gpus=2 * replicas)
    assert run.result["status"] == "ok", run.cause
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(2 * replicas), "--redirects", "3"]
    subprocess.run(
        [sys.executable, *command, "--log-dir", str(tmp_path / "real"), str(SCHEDULES), *arguments],
        check=True, timeout=200,
    )  # fmt: skip
    for rank in (0, replicas):
        printed = next((tmp_path / "real").glob(f"*/attempt_0/{rank}/stdout.log")).read_text()
        folder = run.folder if rank == 0 else run.folder / "ranks" / f"rank{rank}"
        simulated = posted((folder / "stdout.log").read_text())
        assert simulated
        assert simulated == posted(printed)


@pytest.mark.campaign
def test_schedules_differ_in_memory_and_bubbles(run_script: RunScript) -> None:
    figures = {}
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble"):
        run = run_script(SCHEDULES, name, "8", "1", "2048", gpus=4)
        again = run_script(SCHEDULES, name, "8", "1", "2048", gpus=4)
        peaks = []
        for rank in range(4):
            record = f"trace/rank{rank}_record.json"
            assert (run.folder / record).read_text() == (again.folder / record).read_text()
            found = json.loads((run.folder / record).read_text())
            peaks.append(max(step["allocated"] for step in found["memory_per_step"]))
        figures[name] = run.result["step_time_s"], peaks
    gpipe, one, zero = figures.values()
    assert one[0] == pytest.approx(gpipe[0], rel=0.05)
    assert zero[0] < 2 * 0.9 * one[0]  # its ranks have two stages each
    assert max(one[1]) < max(gpipe[1])
