"""CPU offload of ``FullyShardedDataParallel``: equal to torch's, and right where torch's is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fsdp_cases import (
    ACCUMULATION,
    Model,
    assert_close,
    loss_of,
    our_full,
    recorded,
    tokens_of,
    torch_full,
    train,
    wrap_model,
)
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl

MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


@contextmanager
def without_accelerator() -> Iterator[None]:
    """torch pins memory and waits for a stream in any case; both fail where there is no accelerator."""
    original = torch.Tensor.pin_memory
    stream: Any = torch.cpu.Stream
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment,method-assign]
    stream.synchronize = lambda self: None
    try:
        yield
    finally:
        torch.Tensor.pin_memory = original  # type: ignore[method-assign]
        del stream.synchronize


def build(kind: str, strategy: str, originals: bool, offload: bool = True, **arguments: Any) -> Any:
    api: Any = torch_fsdp if kind == "torch" else impl
    torch.manual_seed(0)
    return wrap_model(
        kind,
        Model(blocks=2),
        strategy,
        use_orig_params=originals,
        cpu_offload=api.CPUOffload(offload_params=offload),
        **arguments,
    )


def case_like_torch(
    rank: int, *, strategy: str, originals: bool, offloaded: bool, steps: int = 3, way: str = "", **both: Any
) -> None:
    """``offloaded`` is whether torch's is; it is not where torch's result with offload differs from its own
    without.
    """
    if strategy == "HYBRID_SHARD":
        both["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    several = {"microbatches": 2, "microbatch": ACCUMULATION[way]} if way else {}
    outcomes, records = [], []
    for kind in ("impl", "torch"):
        with without_accelerator():
            model = build(kind, strategy, originals, kind == "impl" or offloaded, **both)
            with recorded(kind) as record:
                outcomes.append(train(model, rank, lambda _: {}, lambda _: {}, steps=steps, **several))
        records.append([name for name, _ in record])
        outcomes[-1].parameters = (our_full if kind == "impl" else torch_full)(model, False)
    assert outcomes[0].losses == pytest.approx(outcomes[1].losses, rel=1e-6)
    assert_close(outcomes[0].parameters, outcomes[1].parameters)
    assert records[0] == records[1]


OFFLOADED: dict[str, dict[str, Any]] = {
    "full": {"strategy": "FULL_SHARD", "steps": 10},
    "grad_op": {"strategy": "SHARD_GRAD_OP"},
    "bf16": {"strategy": "FULL_SHARD", "precision": (torch.bfloat16, torch.float32)},
    "accumulated": {"strategy": "FULL_SHARD", "way": "no_sync"},
}


@pytest.mark.parametrize("case", OFFLOADED)
def test_equals_torch(two_ranks, case: str) -> None:
    two_ranks.run(case_like_torch, offloaded=True, originals=False, **OFFLOADED[case])


@MODES
@pytest.mark.parametrize("way", ["no_sync", "every_reduces"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_equals_torch_without_offload(two_ranks, strategy: str, way: str, originals: bool) -> None:
    """Original parameters, replicas, and accumulation outside ``no_sync``."""
    two_ranks.run(case_like_torch, strategy=strategy, originals=originals, offloaded=False, way=way)


def test_hybrid_equals_torch(four_ranks) -> None:
    four_ranks.run(case_like_torch, strategy="HYBRID_SHARD", originals=True, offloaded=False)


def case_around_training(rank: int, *, originals: bool) -> None:
    """Clipping, whole parameters with gradients, writing back, the first broadcast: as without offload."""
    states, norms, summoned = [], [], []
    for offload in (True, False):
        model = build("impl", "FULL_SHARD", originals, offload, sync_module_states=True)
        loss_of(model, tokens_of(rank, 0)).backward()
        with impl.FullyShardedDataParallel.summon_full_params(model, with_grads=originals):
            summoned.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            with torch.no_grad():
                model.module.head.weight.mul_(1.5)
        norms.append(model.clip_grad_norm_(0.1).item())
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        states.append(model.state_dict())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert bool(summoned[0]) == originals
    assert_close(summoned[0], summoned[1])
    assert_close(states[0], states[1])


@MODES
def test_around_training(two_ranks, originals: bool) -> None:
    two_ranks.run(case_around_training, originals=originals)
