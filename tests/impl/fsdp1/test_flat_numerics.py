"""AdamW steps of ``FullyShardedDataParallel`` equal torch's own on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import STEPS, Model, assert_close, assert_same_outcome, read_flat, recorded, train, wrap_model
from torch.distributed.device_mesh import init_device_mesh


def outcome_of(
    kind: str, rank: int, model: dict[str, Any], mesh: Any, steps: int, **arguments: Any
) -> tuple[Any, list[tuple[str, int]]]:
    torch.manual_seed(0)
    if mesh is not None:
        names = ("replicate", "shard")[-len(mesh) :]
        arguments["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    wrapped = wrap_model(kind, Model(**model), **arguments)
    gradients, parameters = read_flat(kind)
    flat = not arguments.get("use_orig_params", False)
    with recorded(kind) as collectives:
        outcome = train(wrapped, rank, lambda _: {}, lambda _: {}, steps=steps - 1)
    last = train(wrapped, rank, (lambda _: {}) if flat else gradients, parameters, steps=1)
    outcome.losses += last.losses
    outcome.gradients, outcome.parameters = last.gradients, last.parameters
    return outcome, collectives


def case_like_torch(
    rank: int, *, ours: dict[str, Any], model: dict[str, Any], steps: int = 3, mesh: Any = None, **both: Any
) -> None:
    expected, theirs = outcome_of("torch", rank, model, mesh, steps, **both)
    actual, mine = outcome_of("impl", rank, model, mesh, steps, **both, **ours)
    if both.get("use_orig_params"):
        assert_same_outcome(actual, expected)
    else:
        # torch shows the flat gradient only in its sharded form; its parameters stand for it.
        assert_close({"losses": torch.tensor(actual.losses)}, {"losses": torch.tensor(expected.losses)})
        assert_close(actual.parameters, expected.parameters)
    if both.get("forward_prefetch"):
        # torch gathers the last units of backward in another order from the second iteration on.
        assert sorted(mine) == sorted(theirs)
    elif not ours:
        assert [kind for kind, _ in mine] == [kind for kind, _ in theirs]


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@STEPS
def test_strategies_equal_torch(two_ranks, strategy: str, originals: bool, steps: int) -> None:
    two_ranks.run(
        case_like_torch, model={}, ours={}, steps=steps, strategy=strategy, use_orig_params=originals
    )


CASES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": (torch.bfloat16,)},
    "bf16_reduced_in_fp32": {"precision": (torch.bfloat16, torch.float32)},
    "bf16_replicas": {"precision": (torch.bfloat16,), "strategy": "NO_SHARD"},
    "prefetch_after_gradients": {"prefetch": "BACKWARD_POST"},
    "no_prefetch": {"prefetch": None},
    "forward_prefetch": {"forward_prefetch": True},
    "no_limit": {"limit_all_gathers": False},
    "root_only": {"blocks": False},
    "tied": {"model": {"tied": True}},
    "frozen": {"model": {"frozen": "up"}, "use_orig_params": True},
    "frozen_unit": {"model": {"frozen": "blocks.1."}},
    "checkpointed": {"model": {"checkpointing": "non-reentrant"}},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(two_ranks, name: str) -> None:
    two_ranks.run(case_like_torch, **{"model": {}, "ours": {}, **CASES[name]})


OURS: dict[str, dict[str, Any]] = {
    "prefetch_two_ahead": {"backward_prefetch_depth": 2, "forward_prefetch_depth": 2},
    "by_events": {"memory_handover": "events"},
    "limit_of_one": {"limit_all_gathers": 1},
    "adapting_limit": {"limit_all_gathers": "auto"},
}


@pytest.mark.parametrize("name", OURS)
def test_schedule_changes_no_number(two_ranks, name: str) -> None:
    two_ranks.run(case_like_torch, model={}, ours=OURS[name], use_orig_params=True)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_equals_torch(four_ranks, strategy: str) -> None:
    four_ranks.run(case_like_torch, model={}, mesh=(2, 2), ours={}, strategy=strategy, use_orig_params=True)
