"""A script that asks torch for a barrier after each group's start does not wait for ranks that do not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript


def test_barrier_after_init(run_probe: RunScript) -> None:
    run = run_probe(
        """
        import os, torch.distributed as dist
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        dist.init_process_group("cpu:gloo,cuda:nccl")
        dist.new_group([0, 1])
        train(3)
        """
    )
    assert run.result["status"] == "ok", run.cause
