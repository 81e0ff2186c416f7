"""Layers in fp8 whose weights are gathered in fp8: both FSDP2s compute what the unsharded model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl
from fsdpbench.workloads import get_workload
from fsdpbench.workloads.narrow.blocks import NarrowProjection, gather_narrowly, narrow
from fsdpbench.workloads.narrow.eight_bits import EightBitWeight, NarrowlyGathered, scale_weights

SHAPE = {"layers": 2, "d_model": 32, "d_ff": 64, "heads": 2, "kv_heads": 2, "vocab": 64}
STEPS = 3


def built(seed: int = 0, **shape: Any) -> tuple[nn.Module, Any]:
    workload = get_workload("llama-tiny", SHAPE | shape)
    torch.manual_seed(seed)
    model = workload.build(seq=16)
    narrow(model, workload.block_classes, "fp8")
    return model, workload


def sharded(side: str, model: nn.Module, workload: Any, ranks: tuple[int, ...]) -> Any:
    api: Any = impl if side == "impl" else torch_fsdp
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(ranks) :])
    gather_narrowly(model)
    for module in [m for m in model.modules() if isinstance(m, workload.block_classes)]:
        api.fully_shard(module, mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    return model


def trained(model: nn.Module, workload: Any, optimizer: type[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Parameters after some steps on data that are the same on all ranks."""
    made = optimizer(model.parameters(), lr=1e-3)
    made.register_step_post_hook(lambda *_: scale_weights(model))
    batches = workload.batches(2, 16, 0, 0, "cpu")
    for _ in range(STEPS):
        model(*next(batches)).backward()
        made.step()
        made.zero_grad()
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole(parameter: Any) -> Tensor:
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
    return found.held if isinstance(found, NarrowlyGathered) else found


def case_like_unsharded(rank: int, *, ranks: tuple[int, ...], name: str) -> None:
    optimizer = getattr(torch.optim, name)
    wanted = trained(*built(), optimizer)
    for side in ("impl", "torch"):
        model, workload = built()
        found = trained(sharded(side, model, workload, ranks), workload, optimizer)
        for each, parameter in wanted.items():
            assert torch.equal(found[each], parameter), (side, each)


@pytest.mark.plain_cases("AdamW")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_training_equals_the_unsharded_model(two_ranks: Any, name: str) -> None:
    two_ranks.run(case_like_unsharded, ranks=(2,), name=name)


@pytest.mark.campaign
def test_with_replicas(four_ranks: Any) -> None:
    four_ranks.run(case_like_unsharded, ranks=(2, 2), name="AdamW")


def case_stale_scales(rank: int) -> None:
    """What is gathered is cast with the largest magnitude of the whole weight, also where another rank has
    it and after it has grown."""
    for side in ("impl", "torch"):
        model, workload = built()
        model = sharded(side, model, workload, (2,))
        block = next(m for m in model.modules() if isinstance(m, workload.block_classes))
        layer = next(m for m in block.modules() if isinstance(m, NarrowProjection))
        for grown in (1.0, 3.0):
            with torch.no_grad():
                local: Any = layer.weight._local_tensor  # type: ignore[attr-defined]
                local.held.mul_(grown if rank else 1.0)
            scale_weights(model)
            wanted = whole(layer.weight).abs().max() / 448
            block.unshard()
            assert isinstance(layer.weight, EightBitWeight)
            torch.testing.assert_close(layer.weight.inverse8, wanted)
            assert layer.weight.data8.float().abs().max() == 448
            block.reshard()


def test_all_ranks_scale_by_the_whole_weight(two_ranks: Any) -> None:
    two_ranks.run(case_stale_scales)


def case_uneven(rank: int) -> None:
    """16 rows on three ranks: 6, 6 and 4."""
    shape = {"d_model": 16, "d_ff": 32}
    wanted = trained(*built(**shape), torch.optim.SGD)
    for side in ("impl", "torch"):
        model, workload = built(**shape)
        found = trained(sharded(side, model, workload, (3,)), workload, torch.optim.SGD)
        for each, parameter in wanted.items():
            torch.testing.assert_close(found[each], parameter, msg=f"{side} {each}")


@pytest.mark.campaign
def test_rows_that_do_not_divide_evenly(three_ranks: Any) -> None:
    three_ranks.run(case_uneven)
