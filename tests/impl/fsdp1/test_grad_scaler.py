"""``ShardedGradScaler``: all ranks skip a step or none does, and the scale moves as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Model, assert_close, loss_of, our_full, tokens_of, torch_full, wrap_model
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler

from fsdpbench import impl


def scaler_of(kind: str, **arguments: Any) -> Any:
    made: Any = TorchScaler if kind == "torch" else impl.ShardedGradScaler
    return made("cpu", init_scale=16.0, growth_interval=2, **arguments)


def case_like_torch(rank: int, *, originals: bool, strategy: str, clip: bool) -> None:
    """Six steps; in the third the gradients of rank 1 alone overflow."""
    scales: list[list[float]] = []
    whole = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        half = (torch.float16, torch.float16)
        model: Any = wrap_model(kind, Model(blocks=2), strategy, precision=half, use_orig_params=originals)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = scaler_of(kind)
        scales.append([])
        for step in range(6):
            loss = loss_of(model, tokens_of(rank, step))
            scaler.scale(loss * (1e30 if step == 2 and rank == 1 else 1.0)).backward()
            if clip:
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())
        whole.append((our_full if kind == "impl" else torch_full)(model, False))
    assert scales[0] == scales[1] == [16.0, 32.0, 16.0, 16.0, 32.0, 32.0]
    assert all(value.isfinite().all() for value in whole[0].values())
    assert_close(*whole, tolerance=2e-3)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize(
    ("strategy", "originals"), [("FULL_SHARD", False), ("FULL_SHARD", True), ("NO_SHARD", True)]
)
def test_equals_torch(two_ranks, strategy: str, originals: bool, clip: bool) -> None:
    two_ranks.run(case_like_torch, strategy=strategy, originals=originals, clip=clip)


def one_parameter(gradient: float | None, fused: bool = False) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = None if gradient is None else torch.full((4,), gradient)
    return parameter, torch.optim.AdamW([parameter], lr=0.1, fused=fused)


def case_one_overflows(rank: int, *, fused: bool) -> None:
    """A step is skipped everywhere, by optimizers that unscale in their own kernel too, and nowhere else."""
    for bad in (True, False):
        scaler = scaler_of("impl")
        scaler.scale(torch.ones(()))
        parameter, optimizer = one_parameter(float("inf") if bad and rank == 0 else 1.0, fused)
        scaler.step(optimizer)
        scaler.update()
        assert bool((parameter == 1).all()) == bad
        assert scaler.get_scale() == (8.0 if bad else 16.0)


@pytest.mark.parametrize("fused", [False, True])
def test_one_overflows(two_ranks, fused: bool) -> None:
    two_ranks.run(case_one_overflows, fused=fused)


def case_without_gradients(rank: int) -> None:
    scaler = scaler_of("impl", process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    parameter, optimizer = one_parameter(float("nan") if rank == 0 else None)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert bool((parameter == 1).all())


def test_a_rank_without_gradients_takes_part(two_ranks) -> None:
    two_ranks.run(case_without_gradients)


def test_scaled_outputs_keep_structure_and_dtype() -> None:
    scaler = scaler_of("impl")
    half, single = torch.ones(2, dtype=torch.float16), torch.ones(())
    first, [second] = scaler.scale((half, [single]))
    assert first.dtype == torch.float16
    assert first.tolist() == [16.0, 16.0]
    assert second.item() == 16.0
    assert [t.item() for t in scaler.scale(t for t in (single, single))] == [16.0, 16.0]
    with pytest.raises(ValueError, match="not int"):
        scaler.scale(3)


def test_disabled_does_nothing() -> None:
    scaler = scaler_of("impl", enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    parameter, optimizer = one_parameter(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not bool((parameter == 1).any())
