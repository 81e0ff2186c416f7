"""Whole parameters of ``FullyShardedDataParallel``: summoned, saved, loaded, clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    Model,
    assert_close,
    loss_of,
    our_full,
    read_flat,
    tokens_of,
    torch_full,
    wrap_model,
)
from torch import nn

from fsdpbench import impl

MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


def build(kind: str, originals: bool, seed: int = 0, steps: int = 1, rank: int = 0, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    arguments.setdefault("strategy", "FULL_SHARD")
    model: Any = wrap_model(kind, Model(blocks=2, tied=True), use_orig_params=originals, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model, tokens_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def case_state_dict(rank: int, *, originals: bool) -> None:
    """Keys and values are torch's, and those of the plain model."""
    states = [build(kind, originals, rank=rank).state_dict() for kind in ("impl", "torch")]
    assert list(states[0]) == list(states[1]) == list(Model(blocks=2, tied=True).state_dict())
    assert_close(states[0], states[1])


@MODES
def test_state_dict(two_ranks, originals: bool) -> None:
    two_ranks.run(case_state_dict, originals=originals)


def case_load(rank: int, *, originals: bool) -> None:
    state = build("torch", originals, rank=rank).state_dict()
    for steps in (0, 1):
        target = build("impl", originals, seed=1, steps=steps, rank=rank)
        answer = target.load_state_dict(state)
        assert not answer.missing_keys
        assert not answer.unexpected_keys
        assert_close(target.state_dict(), state, 0)
        plain = Model(blocks=2, tied=True)
        plain.load_state_dict(state)
        expected = loss_of(plain, tokens_of(rank, 3)).item()
        assert loss_of(target, tokens_of(rank, 3)).item() == pytest.approx(expected, rel=1e-6)
    del state["blocks.1.up.bias"]
    state["other"] = torch.zeros(1)
    answer = target.load_state_dict(state, strict=False)
    assert answer.missing_keys == ["blocks.1.up.bias"]
    assert answer.unexpected_keys == ["other"]
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.bias"):
        target.load_state_dict(state)
    loss_of(target, tokens_of(rank, 4)).backward()


@MODES
def test_load_state_dict(two_ranks, originals: bool) -> None:
    two_ranks.run(case_load, originals=originals)


def case_summon(rank: int, *, originals: bool) -> None:
    model = build("impl", originals, rank=rank)
    sharded = [name for name, _ in model.named_parameters()]
    with impl.FullyShardedDataParallel.summon_full_params(model):
        whole = dict(model.named_parameters())
        assert list(whole) == [name for name, _ in Model(blocks=2, tied=True).named_parameters()]
        assert model.module.blocks[0].up.weight.shape == (60, 15)
        with torch.no_grad():
            model.module.blocks[0].up.weight.fill_(0.25)
    assert [name for name, _ in model.named_parameters()] == sharded
    assert (our_full(model, False)["blocks.0.up.weight"] == 0.25).all()
    with impl.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        with torch.no_grad():
            model.module.blocks[0].up.weight.fill_(7)
    assert (our_full(model, False)["blocks.0.up.weight"] == 0.25).all()
    with impl.FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
        shown = sum(parameter.numel() for parameter in model.parameters())
        whole_numel = sum(parameter.numel() for parameter in Model(blocks=2, tied=True).parameters())
        assert (shown == whole_numel) == (rank == 0)
    with pytest.raises(NotImplementedError, match="rank0_only"):
        with impl.FullyShardedDataParallel.summon_full_params(model, rank0_only=True):
            pass
    loss_of(model, tokens_of(rank, 0)).backward()


@MODES
def test_summon_full_params(two_ranks, originals: bool) -> None:
    two_ranks.run(case_summon, originals=originals)


def case_summon_gradients(rank: int) -> None:
    found = []
    for kind in ("impl", "torch"):
        model = build(kind, True, steps=0)
        loss_of(model, tokens_of(rank, 0)).backward()
        if kind == "torch":
            found.append(torch_full(model, True))
            continue
        with impl.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert all(p.grad is not None for p in model.parameters() if p.numel())
    assert_close(found[0], found[1])


def test_summon_gradients(two_ranks) -> None:
    two_ranks.run(case_summon_gradients)


def case_not_inside_forward(rank: int) -> None:
    model = build("impl", False)

    def summon(*_: Any) -> None:
        with impl.FullyShardedDataParallel.summon_full_params(model):
            pass

    model.module.norm.register_forward_hook(summon)
    with pytest.raises(AssertionError, match="inside the forward of unit 'root'"):
        model(tokens_of(rank, 0))


def test_not_inside_forward(two_ranks) -> None:
    two_ranks.run(case_not_inside_forward)


def case_apply(rank: int, *, originals: bool) -> None:
    @torch.no_grad()
    def ones(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(1.0)

    model = build("impl", originals)
    model.apply(ones)
    whole = our_full(model, False)
    assert all((value == 1).all() for name, value in whole.items() if "up.weight" in name)


@MODES
def test_apply(two_ranks, originals: bool) -> None:
    two_ranks.run(case_apply, originals=originals)


def case_clip(rank: int, *, originals: bool, strategy: str, norm_type: float) -> None:
    norms, values = [], []
    for kind in ("impl", "torch"):
        model = build(kind, originals, steps=0, strategy=strategy)
        loss_of(model, tokens_of(rank, 0)).backward()
        norms.append(model.clip_grad_norm_(0.01, norm_type).item())
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        values.append(read_flat(kind)[1](model))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_close(values[0], values[1])


@MODES
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm(two_ranks, originals: bool, strategy: str, norm_type: float) -> None:
    two_ranks.run(case_clip, originals=originals, strategy=strategy, norm_type=norm_type)
