"""CPU offload of ``fully_shard``: equal to torch's, whatever is accumulated, reduced or hooked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import (
    ACCUMULATION,
    STEPS,
    Model,
    assert_same_outcome,
    loss_of,
    read_shards,
    recorded,
    shard_model,
    tokens_of,
    train,
)
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl


def build(kind: str, mesh: tuple[int, ...], model: dict[str, Any] | None = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    names = ("replicate", "shard")[-len(mesh) :]
    # torch pins memory for an accelerator only, and fails where there is none.
    api: Any = torch_fsdp if kind == "torch" else impl
    policy = api.CPUOffloadPolicy(pin_memory=False)
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    return shard_model(kind, Model(**model or {}), mesh=device_mesh, offload_policy=policy, **arguments)


def case_like_torch(
    rank: int, *, mesh: tuple[int, ...], way: str = "", steps: int, same_sizes: bool = True, **both: Any
) -> None:
    training: dict[str, Any] = {"steps": steps}
    if way:
        training |= {"microbatches": 3, "microbatch": ACCUMULATION[way]}
    outcomes, records = [], []
    for kind in ("impl", "torch"):
        model = build(kind, mesh, **both)
        with recorded(kind) as record:
            outcomes.append(train(model, rank, *read_shards, **training))
        records.append(record if same_sizes else [name for name, _ in record])
    assert_same_outcome(*outcomes)
    assert records[0] == records[1]


BF16 = (torch.bfloat16, torch.float32)
TWO_RANKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"policy": (torch.bfloat16,)},
    "bf16_reduced_in_fp32": {"policy": BF16},
    "kept_after_forward": {"reshard_after_forward": False},
    "frozen": {"model": {"frozen": "up"}},
}


@pytest.mark.parametrize("name", TWO_RANKS)
@STEPS
def test_training_equals_torch(two_ranks, name: str, steps: int) -> None:
    two_ranks.run(case_like_torch, mesh=(2,), steps=steps, **TWO_RANKS[name])


@pytest.mark.plain_cases("last_reduces-bf16", "every_reduces-fp32")
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["last_reduces", "every_reduces"])
def test_accumulation_equals_torch(two_ranks, way: str, policy: Any) -> None:
    two_ranks.run(case_like_torch, mesh=(2,), way=way, policy=policy, steps=2)


@pytest.mark.plain_cases("hybrid_accumulated")
@pytest.mark.parametrize(
    "case",
    [
        {"mesh": (2, 2), "way": "last_sums_replicas", "policy": BF16},
        {"mesh": (2, 2)},
        {"mesh": (4, 1)},
        {"mesh": (4,), "reshard_after_forward": 2, "same_sizes": False},
    ],
    ids=["hybrid_accumulated", "hybrid", "replicated", "gathered_among_two"],
)
def test_four_ranks_equal_torch(four_ranks, case: dict[str, Any]) -> None:
    four_ranks.run(case_like_torch, steps=2, **case)


def case_alone(rank: int, *, policy: Any) -> None:
    """One rank: the copies from and to the host are what is left; values equal those without offload."""
    outcomes = []
    for offload in (impl.CPUOffloadPolicy(), impl.OffloadPolicy()):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1,))
        model = shard_model("impl", Model(), mesh=mesh, offload_policy=offload, policy=policy)
        outcomes.append(train(model, rank, *read_shards, steps=3, microbatches=2))
    assert_same_outcome(*outcomes, tolerance=0)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_one_rank_alone(one_rank, policy: Any) -> None:
    one_rank.run(case_alone, policy=policy)


def case_optimizer_in_backward(rank: int) -> None:
    """A hook that steps and drops each gradient sees it whole, and sees it once."""
    results = []
    for kind in ("impl", "torch"):
        model = build(kind, (2,))
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def step(parameter: Any, optimizers: Any = optimizers) -> None:
            assert parameter.grad.to_local().device.type == "cpu"
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for index in range(3):
            loss_of(model, tokens_of(rank, index)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        results.append([p.full_tensor().detach() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_optimizer_in_backward(two_ranks) -> None:
    two_ranks.run(case_optimizer_in_backward)


def case_deferred(rank: int) -> None:
    """From the meta device: materialised on the host, and loaded there by assignment."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    source = nn.Linear(5, 3)
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(5, 3))
    impl.fully_shard(model, mesh=mesh, offload_policy=impl.CPUOffloadPolicy())
    model.to_empty(device="cpu")
    whole = {f"0.{name}": value for name, value in source.state_dict().items()}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    x = torch.ones(2, 5)
    torch.testing.assert_close(model(x), source(x))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model(x).sum().backward()
    assert all(p.to_local().device.type == "cpu" for p in model.parameters())


def test_meta_device(two_ranks) -> None:
    two_ranks.run(case_deferred)
