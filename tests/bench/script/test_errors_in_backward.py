"""What a script's hooks raise inside of backward is the run's cause, or the script's to catch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

HOOKED = """
from torch.distributed.fsdp import fully_shard
import torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]).cuda()
for each in (*model, model):
    fully_shard(each)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    y = model(torch.randn(8, 64, device="cuda"))
    if step == 4:
        y.register_hook(lambda gradient: {raised})
    {backward}
    optimizer.step()
    optimizer.zero_grad()
"""
RAISED = {
    "memory": ('torch.empty(1 << 45, device="cuda")', "oom", "CUDA out of memory. Tried to allocate"),
    "own": ("int('the loss')", "error", "rank 0: ValueError: invalid literal for int() with base 10"),
}
CAUGHT = (
    "try: y.sum().backward()\n    except (ValueError, torch.OutOfMemoryError) as e: print('caught', type(e))"
)


@pytest.mark.parametrize("name", RAISED)
def test_it_is_the_cause(name: str, run_probe: RunScript) -> None:
    raised, status, cause = RAISED[name]
    run = run_probe(HOOKED.format(raised=raised, backward="y.sum().backward()"))
    assert run.result["status"] == status
    assert cause in run.cause


@pytest.mark.parametrize("name", RAISED)
def test_a_script_may_catch_it(name: str, run_probe: RunScript) -> None:
    run = run_probe(HOOKED.format(raised=RAISED[name][0], backward=CAUGHT), to_the_end=True)
    assert run.result["status"] == "ok", run.cause
    assert run.output.count("caught") == 1


def test_a_refusal_of_ours_is_the_cause(run_probe: RunScript) -> None:
    """`impl` refuses parameters written between forward and backward, in a hook."""
    text = HOOKED.replace("torch.distributed.fsdp", "fsdpbench.impl")
    written = """for each in (*model, model): each.reshard()
    with torch.no_grad(): model[0].weight.mul_(0.5)
    y.sum().backward()"""
    run = run_probe(text.format(raised="None", backward=written))
    assert run.result["status"] == "error"
    assert "were written to between its forward and its backward" in run.cause
