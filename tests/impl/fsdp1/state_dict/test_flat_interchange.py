"""Checkpoints pass between torch's FSDP1, ours, our FSDP2 and plain models, and training goes on equally."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import Block, assert_close
from state_cases import Parts, api_of, kept_as, train, wrapped

from fsdpbench import impl

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def optimizer_for(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def trained(kind: str, rank: int, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = wrapped(kind, **arguments)
    optimizer = optimizer_for(model)
    train(model, optimizer, rank, range(2))
    return model, optimizer


def on_device(kind: str) -> Any:
    name = kind.split("_")[0].capitalize()
    return ((f"{name}StateDictConfig", {}), (f"{name}OptimStateDictConfig", {"offload_to_cpu": False}))


def case_between(rank: int, source: str, **arguments: Any) -> None:
    """From one implementation to the other; both go on with equal losses."""
    target = "impl" if source == "torch" else "torch"
    for kind in (FULL, SHARDED):
        model, optimizer = trained(source, rank, **arguments)
        other = wrapped(target, seed=1, **arguments)
        other_optimizer = optimizer_for(other)
        with kept_as(source, model, kind, *on_device(kind)):
            state = model.state_dict()
            optim_state = api_of(source).FullyShardedDataParallel.optim_state_dict(model, optimizer)
        with kept_as(target, other, kind, *on_device(kind)):
            other.load_state_dict(state)
            load = api_of(target).FullyShardedDataParallel.optim_state_dict_to_load
            other_optimizer.load_state_dict(load(other, other_optimizer, optim_state))
        expected = train(model, optimizer, rank, range(2, 5))
        assert train(other, other_optimizer, rank, range(2, 5)) == pytest.approx(expected, rel=1e-6)


SOURCES = pytest.mark.parametrize("source", ["torch", "impl"])
MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


@pytest.mark.plain_cases("original-impl", "flat-torch")
@SOURCES
@MODES
def test_between(two_ranks, source: str, originals: bool) -> None:
    two_ranks.run(case_between, source=source, use_orig_params=originals)


@pytest.mark.plain_cases("impl")
@SOURCES
def test_between_with_mesh(two_ranks, source: str) -> None:
    two_ranks.run(case_between, source=source, mesh=(2,), use_orig_params=True)


@pytest.mark.plain_cases("torch")
@SOURCES
def test_between_hybrid(four_ranks, source: str) -> None:
    arguments = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
    four_ranks.run(case_between, source=source, **arguments)


def case_from_mode_to_mode(rank: int) -> None:
    """Whole and sharded values do not tell how a model was wrapped: flat or not, blocks or root only."""
    for kind in (FULL, SHARDED):
        model, optimizer = trained("impl", rank)
        torch.manual_seed(1)
        plain = Parts()
        other: Any = impl.FullyShardedDataParallel(
            plain, use_orig_params=True, ignored_modules=[plain.ignored]
        )
        other_optimizer = optimizer_for(other)
        with kept_as("impl", model, kind), kept_as("impl", other, kind):
            other.load_state_dict(model.state_dict())
            state = impl.FullyShardedDataParallel.optim_state_dict(model, optimizer)
            impl.FullyShardedDataParallel.optim_state_dict_to_load(
                other, other_optimizer, state, load_directly=True
            )
        expected = train(model, optimizer, rank, range(2, 5))
        assert train(other, other_optimizer, rank, range(2, 5)) == pytest.approx(expected, rel=1e-6)


def test_from_mode_to_mode(two_ranks) -> None:
    two_ranks.run(case_from_mode_to_mode)


def case_to_fsdp2_and_plain(rank: int) -> None:
    """By the whole state dict: to our ``fully_shard``, to a plain model, and back."""
    from torch.distributed.tensor import distribute_tensor

    model, _ = trained("impl", rank, model=Parts(checkpointing=False))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    plain = Parts(checkpointing=False)
    plain.load_state_dict(whole)
    assert_close(plain.state_dict(), whole, 0)
    sharded: Any = Parts(checkpointing=False)
    for block in sharded.modules():
        if isinstance(block, Block):
            impl.fully_shard(block)
    impl.fully_shard(sharded, ignored_params=set(sharded.ignored.parameters()))
    here = sharded.state_dict()
    sharded.load_state_dict(
        {
            name: distribute_tensor(value, here[name].device_mesh, here[name].placements)
            if hasattr(here[name], "placements")
            else value
            for name, value in whole.items()
        }
    )
    back = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in sharded.state_dict().items()
    }
    assert_close(back, whole, 0)
    with kept_as("impl", model, SHARDED):
        model.load_state_dict({name: value + 1 for name, value in sharded.state_dict().items()})
    assert_close(model.state_dict(), {name: value + 1 for name, value in whole.items()}, 0)


def test_to_fsdp2_and_plain(two_ranks) -> None:
    two_ranks.run(case_to_fsdp2_and_plain)
