"""Gradient accumulation with and without communication equals torch's, in result and in collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    ACCUMULATION,
    Model,
    assert_close,
    assert_same_outcome,
    every_reduces,
    no_sync,
    read_flat,
    read_shards,
    recorded,
    shard_model,
    train,
    wrap_model,
)
from torch.distributed.device_mesh import init_device_mesh


def case_fully_shard(rank: int, *, way: str, mesh: tuple[int, ...], policy: Any) -> None:
    outcomes, records = [], []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        names = ("replicate", "shard")[-len(mesh) :]
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        model = shard_model(kind, Model(blocks=2), mesh=device_mesh, policy=policy)
        with recorded(kind) as record:
            outcomes.append(
                train(model, rank, *read_shards, steps=2, microbatches=3, microbatch=ACCUMULATION[way])
            )
        records.append(record)
    assert_same_outcome(*outcomes)
    assert records[0] == records[1]


BF16 = (torch.bfloat16, torch.float32)


@pytest.mark.plain_cases("every_reduces-bf16", "last_reduces_and_frees-fp32", "last_reduces-fp32")
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["last_reduces", "last_reduces_and_frees", "every_reduces"])
def test_fully_shard(two_ranks, way: str, policy: Any) -> None:
    two_ranks.run(case_fully_shard, way=way, mesh=(2,), policy=policy)


@pytest.mark.plain_cases("bf16")
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_fully_shard_sums_replicas_once(four_ranks, policy: Any) -> None:
    four_ranks.run(case_fully_shard, way="last_sums_replicas", mesh=(2, 2), policy=policy)


def case_flat(rank: int, *, strategy: str, synchronise: bool, originals: bool) -> None:
    outcomes, records = [], []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model = wrap_model(kind, Model(blocks=2), strategy, use_orig_params=originals)
        with recorded(kind) as record:
            outcome = train(
                model,
                rank,
                lambda _: {},
                lambda _: {},
                steps=2,
                microbatches=3,
                microbatch=every_reduces if synchronise else no_sync,
            )
        records.append([name for name, _ in record])
        outcome.parameters = read_flat(kind)[1](model)
        outcomes.append(outcome)
    assert outcomes[0].losses == pytest.approx(outcomes[1].losses, rel=1e-6)
    assert_close(outcomes[0].parameters, outcomes[1].parameters)
    assert records[0] == records[1]


EVERY_WAY = [
    pytest.param(
        strategy,
        synchronise,
        originals,
        # How parameters are kept and shown changes nothing where every microbatch reduces.
        marks=[pytest.mark.campaign] if synchronise and (strategy, originals) != ("FULL_SHARD", True) else [],
    )
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for synchronise in (True, False)
    for originals in (True, False)
]


@pytest.mark.parametrize(("strategy", "synchronise", "originals"), EVERY_WAY)
def test_flat(two_ranks, strategy: str, synchronise: bool, originals: bool) -> None:
    two_ranks.run(case_flat, strategy=strategy, synchronise=synchronise, originals=originals)


def case_no_sync_belongs_to_the_root(rank: int) -> None:
    model: Any = wrap_model("impl", Model(blocks=1))
    model.check_is_root()
    with pytest.raises(RuntimeError, match="outermost"):
        with model.module.blocks[0].no_sync():
            pass


def test_no_sync_belongs_to_the_root(two_ranks) -> None:
    two_ranks.run(case_no_sync_belongs_to_the_root)
