"""AdamW steps of ``fully_shard`` equal torch's own on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import STEPS, Model, assert_same_outcome, read_shards, recorded, shard_model, train
from torch.distributed.device_mesh import init_device_mesh


def outcome_of(
    kind: str, rank: int, model: dict[str, Any], mesh: tuple[int, ...], steps: int, **arguments: Any
) -> tuple[Any, list[tuple[str, int]]]:
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(mesh) :]
    arguments["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    with recorded(kind) as collectives:
        wrapped = shard_model(kind, Model(**model), **arguments)
        outcome = train(wrapped, rank, *read_shards, steps=steps)
    return outcome, collectives


def case_like_torch(
    rank: int,
    *,
    ours: dict[str, Any],
    model: dict[str, Any],
    steps: int = 2,
    same_order: bool = False,
    **both: Any,
) -> None:
    expected, theirs = outcome_of("torch", rank, model, steps=steps, **both)
    actual, mine = outcome_of("impl", rank, model, steps=steps, **both, **ours)
    assert_same_outcome(actual, expected)
    if both.get("reshard_after_forward") == 2:
        # The same collectives; without the padding that the gather among all ranks needed, ours are smaller.
        assert [kind for kind, _ in mine] == [kind for kind, _ in theirs]
        assert all(a <= b for (_, a), (_, b) in zip(mine, theirs, strict=True))
    elif same_order or not ours:
        assert mine == theirs


SHARD = {"mesh": (2,)}
TRAINED: dict[str, dict[str, Any]] = {
    "full_shard": SHARD,
    "kept_after_forward": {**SHARD, "reshard_after_forward": False},
    "replicate": {"mesh": (2, 1)},
    "bf16": {**SHARD, "policy": (torch.bfloat16,)},
    "bf16_reduced_in_fp32": {**SHARD, "policy": (torch.bfloat16, torch.float32)},
}
CASES: dict[str, dict[str, Any]] = {
    "root_freed_too": {**SHARD, "reshard_after_forward": True},
    "root_only": {**SHARD, "blocks": False},
    "fp32_outputs": {**SHARD, "policy": (torch.bfloat16, torch.float32), "root_output": torch.float32},
    "inputs_not_cast": {**SHARD, "policy": (None, torch.bfloat16, None, False)},
    "tied": {**SHARD, "model": {"tied": True}},
    "frozen": {**SHARD, "model": {"frozen": "up"}},
    "frozen_unit": {**SHARD, "model": {"frozen": "blocks.1."}},
    "frozen_first": {**SHARD, "model": {"frozen": "embed"}},
    "checkpointed": {**SHARD, "model": {"checkpointing": "non-reentrant"}},
    "checkpointed_reentrant": {**SHARD, "model": {"checkpointing": "reentrant"}},
}


@pytest.mark.plain_cases("replicate", "bf16")
@pytest.mark.parametrize("name", TRAINED)
@STEPS
def test_training_equals_torch(two_ranks, name: str, steps: int) -> None:
    two_ranks.run(case_like_torch, model={}, ours={}, steps=steps, **TRAINED[name])


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(two_ranks, name: str) -> None:
    case = {"model": {}, "ours": {}, **CASES[name]}
    two_ranks.run(case_like_torch, **case)


OURS: dict[str, dict[str, Any]] = {
    "prefetch_after_gradients": {"backward_prefetch": "post"},
    "no_prefetch": {"backward_prefetch": None},
    "prefetch_two_ahead": {"backward_prefetch_depth": 2, "forward_prefetch_depth": 2},
    "record_stream_with_limit": {"memory_handover": "record_stream", "limit_all_gathers": 1},
}
GROUPED = {"layout": "grouped"}


@pytest.mark.plain_cases("no_prefetch", "prefetch_two_ahead")
@pytest.mark.parametrize("name", OURS)
def test_schedule_changes_no_number(two_ranks, name: str) -> None:
    two_ranks.run(case_like_torch, model={}, mesh=(2,), steps=3, ours=OURS[name], reshard_after_forward=True)


@pytest.mark.plain_cases("bf16_reduced_in_fp32", "checkpointed", "tied")
@pytest.mark.parametrize("name", [*TRAINED, *CASES])
def test_grouped_collectives_equal_torch(two_ranks, name: str) -> None:
    """In the same order and of the same sizes; a group counts as one."""
    case: dict[str, Any] = {"model": {}, "steps": 3, **TRAINED.get(name, CASES.get(name, {}))}
    two_ranks.run(case_like_torch, ours=GROUPED, same_order=name != "replicate", **case)


@pytest.mark.plain_cases("mesh2")
@pytest.mark.parametrize(
    ("mesh", "policy"),
    [((4,), None), ((4,), (torch.bfloat16, torch.float32)), ((2, 2), (torch.bfloat16, torch.float32))],
)
def test_grouped_collectives_of_four_ranks_equal_torch(
    four_ranks, mesh: tuple[int, ...], policy: tuple[Any, ...] | None
) -> None:
    """More ranks than rows: padded, and so packed in their reduction. In bf16 a sum of four depends on its
    order, so it is made in fp32.
    """
    four_ranks.run(case_like_torch, model={}, mesh=mesh, ours=GROUPED, policy=policy, same_order=True)


@pytest.mark.plain_cases("mesh0", "mesh2")
@pytest.mark.parametrize(
    ("mesh", "policy"),
    [((4,), None), ((2, 2), None), ((2, 2), (torch.bfloat16, torch.float32)), ((4, 1), None)],
)
def test_four_ranks_equal_torch(four_ranks, mesh: tuple[int, ...], policy: tuple[Any, ...] | None) -> None:
    """More ranks than the rows of some parameters, and hybrid sharding."""
    four_ranks.run(case_like_torch, model={}, mesh=mesh, ours={}, policy=policy)


@pytest.mark.plain_cases("bf16")
@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_gathering_among_fewer_ranks_in_backward_equals_torch(four_ranks, policy: Any) -> None:
    four_ranks.run(case_like_torch, model={}, mesh=(4,), ours={}, reshard_after_forward=2, policy=policy)
