"""Misuse is refused with a message that names the thing, the value and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from failing_cases import BrokenError, Fuse, gradients_of
from fsdp_cases import Block, Model, loss_of, shard_model, tokens_of, wrap_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpbench import impl


def case_fully_shard_refuses(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"ModuleList.*Wrap its members"):
        impl.fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
    scalar = nn.Module()
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="'gain' of Module is a scalar"):
        impl.fully_shard(scalar, mesh=mesh)
    with pytest.raises(AssertionError, match="already given"):
        impl.fully_shard(impl.fully_shard(nn.Linear(2, 2), mesh=mesh), mesh=mesh)
    with pytest.raises(ValueError, match="FullyShardedDataParallel already"):
        impl.fully_shard(impl.FullyShardedDataParallel(nn.Linear(2, 2)), mesh=mesh)
    with pytest.raises(ValueError, match=r"factor of the 2 ranks.*not 3"):
        impl.fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=3)
    for argument in ("offload_policy", "dp_mesh_dims"):
        arguments: dict[str, Any] = {argument: "yes"}
        with pytest.raises(ValueError, match=f"{argument} must be .*'yes'"):
            impl.fully_shard(nn.Linear(2, 2), mesh=mesh, **arguments)
    with pytest.raises(ValueError, match="'events'"):
        impl.fully_shard(nn.Linear(2, 2), mesh=mesh, memory_handover="hope")
    with pytest.raises(ValueError, match="backward_prefetch_depth"):
        impl.fully_shard(nn.Linear(2, 2), mesh=mesh, backward_prefetch_depth=-1)
    with pytest.raises(ValueError, match="limit_all_gathers"):
        impl.fully_shard(nn.Linear(2, 2), mesh=mesh, limit_all_gathers="many")


def case_tied_across_units_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = Model(blocks=1, tied=True)
    impl.fully_shard(model.head, mesh=mesh)
    with pytest.raises(ValueError, match=r"'embed.weight'.*tied weights must be in one unit"):
        impl.fully_shard(model, mesh=mesh)
    model = Model(blocks=1, tied=True)
    model.head = impl.FullyShardedDataParallel(model.head, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'embed.weight'.*tied weights must be in one unit"):
        impl.FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def case_flat_refuses(rank: int) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"agree in requires_grad.*use_orig_params"):
        wrap_model("impl", Model(frozen="up"), blocks=False)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="agree in dtype"):
        impl.FullyShardedDataParallel(mixed, device_id=cpu)
    with pytest.raises(ValueError, match="not both"):
        impl.FullyShardedDataParallel(
            nn.Linear(2, 2),
            torch.distributed.group.WORLD,
            device_mesh=init_device_mesh("cpu", (2,)),
        )
    with pytest.raises(ValueError, match="two dimensions"):
        impl.FullyShardedDataParallel(
            nn.Linear(2, 2),
            sharding_strategy=impl.ShardingStrategy.HYBRID_SHARD,
            device_mesh=init_device_mesh("cpu", (2,)),
        )
    with pytest.raises(ValueError, match="is not a ShardingStrategy"):
        impl.FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy="FULL")  # type: ignore[arg-type]


def case_meta_parameters_must_be_materialised(rank: int) -> None:
    with torch.device("meta"):
        model = Model(blocks=1)
    wrapped: Any = shard_model("impl", model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match=r"meta device.*to_empty"):
        wrapped(tokens_of(rank, 0))


def case_training_goes_on_after_an_exception(rank: int, *, front: str, where: str, by_hand: bool) -> None:
    """An exception in forward or backward, on all ranks; afterwards all is as if it had not been."""
    torch.manual_seed(0)
    if front == "fully_shard":
        model: Any = shard_model("impl", Model(blocks=3), mesh=init_device_mesh("cpu", (2,)))
        inner = model
    else:
        model = wrap_model("impl", Model(blocks=3), use_orig_params=front == "original")
        inner = model.module
    expected = gradients_of(model, rank)

    def fail(*arguments: Any) -> torch.Tensor:
        if where == "forward":
            raise BrokenError
        return Fuse.apply(arguments[-1])

    hook = inner.blocks[1].norm.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(BrokenError):
            loss_of(model, tokens_of(rank, 0)).backward()
        if by_hand:
            model.reset_iter_state()
            assert all(type(p.data).__name__ == "DTensor" for p in model.parameters())
    hook.remove()
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        loss, gradients = gradients_of(model, rank)
        assert loss == expected[0]
        assert len(gradients) == len(expected[1])
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1], strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("front", "by_hand"),
    [("fully_shard", True), ("fully_shard", False), ("flat", False), ("original", False)],
)
def test_training_goes_on_after_an_exception(two_ranks, front: str, where: str, by_hand: bool) -> None:
    two_ranks.run(case_training_goes_on_after_an_exception, front=front, where=where, by_hand=by_hand)


def case_parts_cannot_run_before_the_root(rank: int) -> None:
    model: Any = shard_model("impl", Model(blocks=1), mesh=init_device_mesh("cpu", (2,)))
    model.blocks[0](torch.zeros(1, 15))
    with pytest.raises(RuntimeError, match=r"'blocks.0' already ran forward as a root"):
        model(tokens_of(rank, 0))


def case_forward_without_its_hooks_is_told(rank: int) -> None:
    model: Any = shard_model("impl", Model(blocks=1), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match=r"module\(\.\.\.\).*unshard\(\).*register_fsdp_forward_method"):
        model.forward(tokens_of(rank, 0))
    expected = model(tokens_of(rank, 0))
    model.reshard()
    for part in (model, *model.blocks):
        part.unshard()
    assert torch.equal(model.forward(tokens_of(rank, 0)), expected)


CASES = [
    case_forward_without_its_hooks_is_told,
    case_fully_shard_refuses,
    case_tied_across_units_is_refused,
    case_flat_refuses,
    case_meta_parameters_must_be_materialised,
    case_parts_cannot_run_before_the_root,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_misuse(two_ranks, case: Any) -> None:
    two_ranks.run(case)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (impl.MixedPrecisionPolicy, {"param_dtype": torch.int8}),
        (impl.MixedPrecisionPolicy, {"reduce_dtype": "bf16"}),
        (impl.MixedPrecision, {"buffer_dtype": torch.int64}),
    ],
)
def test_dtypes_must_be_floating_point(kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        kind(**arguments)


def test_wrapping_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        impl.FullyShardedDataParallel(Block(4))
