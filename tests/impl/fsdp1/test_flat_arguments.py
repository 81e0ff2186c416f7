"""What is left of the wrapper's arguments, and what its flat parameter tells of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Block, Model, assert_close, loss_of, our_full, read_flat, tokens_of, train, wrap_model
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdpbench import impl
from fsdpbench.impl.runtime.presentation import ModulePlace

CPU = torch.device("cpu")


def pairs(rank: int) -> tuple[Any, Any]:
    """Groups of two: (shard, replicate), ranks 0 and 1 share a copy."""
    shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    replicate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return shard, replicate


def case_pair_of_groups(rank: int, *, strategy: str) -> None:
    groups = pairs(rank)
    found = []
    for kind in ("impl", "torch"):
        torch.manual_seed(0)
        model = wrap_model(kind, Model(blocks=2), strategy, use_orig_params=True, process_group=groups)
        found.append(train(model, rank, lambda _: {}, read_flat(kind)[1], steps=3))
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-6)
    assert_close(found[0].parameters, found[1].parameters)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_pair_of_groups_equals_torch(four_ranks, strategy: str) -> None:
    four_ranks.run(case_pair_of_groups, strategy=strategy)


def case_groups_by_node(rank: int) -> None:
    """Nothing is named: all units have the groups of the outermost one, and train as if sharded by all."""
    found = []
    for kind, strategy in (("impl", "HYBRID_SHARD"), ("torch", "FULL_SHARD")):
        torch.manual_seed(0)
        model = wrap_model(kind, Model(blocks=2), strategy, use_orig_params=True)
        found.append(train(model, rank, lambda _: {}, read_flat(kind)[1], steps=3))
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-5)
    assert_close(found[0].parameters, found[1].parameters)


def test_hybrid_with_a_policy_makes_its_groups_by_node(four_ranks) -> None:
    four_ranks.run(case_groups_by_node)


def case_group_of_some_ranks(rank: int) -> None:
    """One process group that is not the world: its ranks share a copy, the others know nothing of it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    whole = Model(blocks=1)
    expected = {name: p.detach().clone() for name, p in whole.named_parameters()}
    model = wrap_model("impl", whole, process_group=groups[rank // 2])
    assert_close(our_full(model, False), expected, 0)
    loss_of(model, tokens_of(rank, 0)).backward()


def test_group_of_some_ranks(four_ranks) -> None:
    four_ranks.run(case_group_of_some_ranks)


def case_tensor_parallel(rank: int, *, originals: bool) -> None:
    """2 x 2: rows and columns over tp, flat parameters of the local tensors over dp; as without tp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for parallel in (True, False):
        torch.manual_seed(0)
        model = Model(blocks=2)
        seen: list[type] = []
        for block in model.blocks if parallel else ():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            block.up.register_forward_hook(lambda m, *_, seen=seen: seen.append(type(m.weight.data)))
        wrapped = wrap_model("impl", model, device_mesh=mesh["dp"], use_orig_params=originals)
        assert all(not isinstance(p, DTensor) for p in wrapped.parameters())
        outcome = train(wrapped, rank // 2, lambda _: {}, lambda _: {}, steps=4, optimizer="SGD")
        assert all(kind is DTensor for kind in seen)
        assert bool(seen) == parallel
        found.append(outcome.losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
def test_tensor_parallel(four_ranks, originals: bool) -> None:
    four_ranks.run(case_tensor_parallel, originals=originals)


def case_flat_parameter(rank: int) -> None:
    """Names, shapes and ranges are torch's, but that ours gives every original a range, empty ones too."""
    ours: Any = impl.FullyShardedDataParallel(Model(blocks=1, tied=True), device_id=CPU)
    theirs: Any = torch_fsdp.FullyShardedDataParallel(Model(blocks=1, tied=True), device_id=CPU)
    mine, other = ours._flat_param, theirs._flat_param
    assert isinstance(mine, impl.FlatParameter)
    assert mine._fqns == tuple(other._fqns)
    assert mine._shapes == tuple(other._shapes)
    assert mine._numels == tuple(other._numels)
    assert mine._unpadded_unsharded_size == other._unpadded_unsharded_size
    assert mine._sharded_size == other._sharded_size == mine.shape
    assert mine._padded_unsharded_size == torch.Size((2 * mine.numel(),))
    places = [(place.name, place.module) for place in mine._param_infos]
    assert [(name, type(module)) for name, module in places] == [
        (info.param_name, type(info.module)) for info in other._param_infos
    ]
    held = {
        name: (info.intra_param_start_idx, info.intra_param_end_idx + 1)
        for name, info in zip(other._fqns, other._shard_param_infos, strict=True)
        if info.in_shard
    }
    ranges = zip(mine._fqns, mine._shard_ranges, strict=True)
    assert {name: (start, end) for name, (start, end) in ranges if end > start} == held
    assert mine._shared_param_infos[0] == (ModulePlace(ours.module.head, "weight"),)


def case_compiled(rank: int) -> None:
    """``torch.compile`` around a wrapped model, and of blocks inside, gives the same numbers."""
    found = []
    for compiled in ("", "around", "blocks"):
        torch.manual_seed(0)
        plain = Model(blocks=1)
        if compiled == "blocks":
            for block in plain.blocks:
                block.compile(backend="eager")
        policy = impl.ModuleWrapPolicy({Block})
        model: Any = impl.FullyShardedDataParallel(
            plain, auto_wrap_policy=policy, use_orig_params=True, device_id=CPU
        )
        run = torch.compile(model, backend="eager") if compiled == "around" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            losses.append(loss_of(run, tokens_of(rank, step)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(found[2], rel=1e-6)


@pytest.mark.campaign
def test_compiled(two_ranks) -> None:
    two_ranks.run(case_compiled, timeout=120)  # the compiler's import takes most of it


def case_summoned_on_the_host(rank: int) -> None:
    model: Any = wrap_model("impl", Model(blocks=1), "NO_SHARD")
    with impl.FullyShardedDataParallel.summon_full_params(model, recurse=False, offload_to_cpu=True):
        names = {name for name, _ in model.named_parameters()}
        assert "embed.weight" in names
        assert not [n for n in names if n.startswith("blocks.0.up")]
        nn.init.ones_(model.module.embed.weight)
    assert (our_full(model, False)["embed.weight"] == 1).all()


CASES = [case_flat_parameter, case_summoned_on_the_host]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_wrapper(two_ranks, case: Any) -> None:
    two_ranks.run(case)
