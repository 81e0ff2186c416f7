"""The cost of a training step on 64 GPUs, and gradients that sharding must not change, without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tinytrain.training import build, shard, train


@pytest.mark.fsdp_budget(peak_gib=1, all_gathers=8, reduce_scatters=4, retries=0)
def test_step_on_64_gpus(simulated_cluster):
    run = simulated_cluster(gpus=64, hardware="h100-80gb")(train, width=2048)
    run.check_baseline(allow={"step_time_s": 0.01})


def gradients(sharded: bool) -> dict[str, torch.Tensor]:
    """The gradients of one batch, of which each rank gets its part."""
    torch.manual_seed(0)
    model, batch = build(16, 2), torch.randn(8, 16)
    if sharded:
        shard(model)
        batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
    model(batch).pow(2).mean().backward()
    every = {name: each.grad for name, each in model.named_parameters()}
    return {name: grad.full_tensor() if sharded else grad for name, grad in every.items()}


def test_sharding_changes_no_gradient(gloo_ranks):
    expected = gradients(sharded=False)
    for rank in gloo_ranks(2)(gradients, sharded=True):
        torch.testing.assert_close(rank, expected)
