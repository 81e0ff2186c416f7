"""Communication hooks of ``FullyShardedDataParallel``: what they get and what comes of it, as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Model, assert_close, loss_of, read_flat, recorded, tokens_of, train, wrap_model
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl
from fsdpbench.impl.fsdp1 import gradients as comm_hooks

MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


def hook_of(kind: str, name: str) -> tuple[Any, Any]:
    """One of the ready hooks with its state, torch's or ours."""
    owner: Any = torch_hooks if kind == "torch" else comm_hooks
    state = owner.LowPrecisionState if "compress" in name else owner.DefaultState
    return state(dist.group.WORLD), getattr(owner, name)


def without_streams(state: Any, gradient: torch.Tensor) -> None:
    """What torch's compressing hooks do last, without its ``record_stream``, which the CPU does not have."""
    gradient.data = gradient.data.to(state.parameter_type)


def case_like_torch(
    rank: int,
    *,
    name: str,
    strategy: str,
    originals: bool,
    theirs_in_ours: bool,
    accumulate: bool,
    **both: Any,
) -> None:
    torch_hooks._decompress = without_streams
    outcomes = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model: Any = wrap_model(kind, Model(blocks=2), strategy, use_orig_params=originals, **both)
        model.register_comm_hook(*hook_of("torch" if theirs_in_ours else kind, name))
        read = read_flat(kind)[1]
        several: dict[str, Any] = {"microbatches": 2, "microbatch": no_sync} if accumulate else {}
        outcomes.append(train(model, rank, lambda _: {}, read, steps=3, optimizer="SGD", **several))
    assert outcomes[0].losses == pytest.approx(outcomes[1].losses, rel=1e-5)
    assert_close(outcomes[0].parameters, outcomes[1].parameters, 1e-5)


def no_sync(model: Any, is_last: bool) -> Any:
    from contextlib import nullcontext

    return nullcontext() if is_last else model.no_sync()


CASES: dict[str, dict[str, Any]] = {
    "all_reduce": {"name": "allreduce_hook", "strategy": "NO_SHARD"},
    "reduce_scatter": {"name": "reduce_scatter_hook"},
    "kept_gathered": {"name": "reduce_scatter_hook", "strategy": "SHARD_GRAD_OP"},
    "fp16": {"name": "fp16_compress_hook"},
    "fp16_replicas": {"name": "fp16_compress_hook", "strategy": "NO_SHARD"},
    "bf16": {"name": "bf16_compress_hook", "originals": True},
    "bf16_replicas": {"name": "bf16_compress_hook", "strategy": "NO_SHARD", "originals": True},
    "torch_hooks": {"name": "fp16_compress_hook", "theirs_in_ours": True},
    "mixed_precision": {"name": "fp16_compress_hook", "precision": (torch.bfloat16, torch.float32)},
    "accumulated": {"name": "reduce_scatter_hook", "accumulate": True},
}
DEFAULTS = {"strategy": "FULL_SHARD", "originals": False, "theirs_in_ours": False, "accumulate": False}


@pytest.mark.parametrize("case", CASES)
def test_equals_torch(two_ranks, case: str) -> None:
    two_ranks.run(case_like_torch, **{**DEFAULTS, **CASES[case]})


def case_what_a_hook_gets(rank: int, *, originals: bool) -> None:
    """Each unit's whole, padded gradient and its shard's size, once a pass; the reducer does nothing."""
    found = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model: Any = wrap_model(kind, Model(blocks=2), use_orig_params=originals)
        seen: list[tuple[int, int, float]] = []

        def scaled(state: Any, gradient: torch.Tensor, output: torch.Tensor, seen: Any = seen) -> None:
            assert gradient.numel() == 2 * output.numel()
            # With original parameters torch aligns each, ours does not: only the sum is the same there.
            sizes = (0, 0) if originals else (gradient.numel(), output.numel())
            seen.append((*sizes, round(float(gradient.double().sum()), 3)))
            output.copy_(gradient.chunk(2)[state] * 3)

        model.register_comm_hook(rank, scaled)
        with recorded(kind) as record:
            loss_of(model, tokens_of(rank, 0)).backward()
        assert "reduce_scatter" not in {name for name, _ in record}
        assert len(seen) == 3
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found.append((seen, read_flat(kind)[1](model)))
    assert found[0][0] == found[1][0]
    if not originals:  # there each rank's part is a different one
        assert_close(found[0][1], found[1][1])


@MODES
def test_what_a_hook_gets(two_ranks, originals: bool) -> None:
    two_ranks.run(case_what_a_hook_gets, originals=originals)


def case_misuse(rank: int) -> None:
    state, hook = hook_of("impl", "reduce_scatter_hook")
    model: Any = wrap_model("impl", Model(blocks=1))
    with pytest.raises(ValueError, match="must be callable but got 7"):
        model.register_comm_hook(state, 7)
    with pytest.raises(AssertionError, match="root instance"):
        model.module.blocks[0].register_comm_hook(state, hook)
    model.register_comm_hook(state, hook)
    with pytest.raises(AssertionError, match="already"):
        model.register_comm_hook(state, hook)
    for strategy, other, says in (
        ("FULL_SHARD", comm_hooks.allreduce_hook, r"unit 'root' is sharded.*\(state, gradient, output\)"),
        ("NO_SHARD", hook, r"unit 'root' is not sharded.*\(state, gradient\)"),
    ):
        model = wrap_model("impl", nn.Linear(4, 4), strategy)
        model.register_comm_hook(state, other)
        with pytest.raises(TypeError, match=says):
            model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="LowPrecisionState needs a process group"):
        impl.LowPrecisionState(None)  # type: ignore[arg-type]


def case_hybrid_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = wrap_model("impl", Model(blocks=1), "HYBRID_SHARD", device_mesh=mesh)
    with pytest.raises(AssertionError, match="HYBRID_SHARD, which reduces twice"):
        model.register_comm_hook(*hook_of("impl", "reduce_scatter_hook"))


def test_misuse(two_ranks) -> None:
    two_ranks.run(case_misuse)


def test_hybrid_is_refused(four_ranks) -> None:
    four_ranks.run(case_hybrid_is_refused)
