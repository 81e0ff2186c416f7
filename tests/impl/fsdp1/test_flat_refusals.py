"""What torch's ``FullyShardedDataParallel`` refuses ours refuses too, with errors of the same type."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat_programs import CPU, Net, Side, attempt, compare
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from fsdpbench import impl


def wrapped_inside(side: Side, **inner: Any) -> Net:
    net = Net()
    net.layers[0] = side.wrap(net.layers[0], **inner)
    return net


def run(side: Side, module: nn.Module, **arguments: Any) -> Any:
    """Wrap ``module`` and train it for a step."""
    side.model = side.wrap(module, **arguments)
    side.loss(0).backward()
    return side.model


def wrapping(side: Side) -> Iterator[tuple[str, Any]]:
    def says(label: str, action: Callable[[], Any]) -> tuple[str, str]:
        return label, attempt(action)

    group, other = dist.group.WORLD, not side.originals
    policy, hybrid = side.policy(), side.api.ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh("cpu", (2,))
    yield says("policy over wrapped", lambda: side.wrap(wrapped_inside(side), auto_wrap_policy=policy))
    yield says("policy over itself", lambda: side.wrap(side.wrap(Net()), auto_wrap_policy=policy))
    yield says("twice", lambda: run(side, side.wrap(Net())))
    yield says("mixed modes", lambda: run(side, wrapped_inside(side, use_orig_params=other)))
    yield says("mixed limits", lambda: run(side, wrapped_inside(side, limit_all_gathers=False)))
    yield says("mixed prefetch", lambda: run(side, wrapped_inside(side, backward_prefetch=None)))
    net = wrapped_inside(side)
    yield says("ignored and wrapped", lambda: side.wrap(net, ignored_modules=[net.layers[0]]))
    yield says("ignored state and wrapped", lambda: side.wrap(net, ignored_states=[net.layers[0]]))
    yield says("ignored with wrapped inside", lambda: run(side, net, ignored_modules=[net.layers]))
    net = Net()
    for label, arguments in {
        "both": {"ignored_modules": [net.enter], "ignored_states": [net.exit]},
        "mixed": {"ignored_states": [net.enter, net.exit.weight]},
        "parameters as modules": {"ignored_modules": [net.exit.weight]},
        "a name": {"ignored_states": ["enter.weight"]},
        "no list": {"ignored_modules": net.enter},
    }.items():
        yield says(f"ignored: {label}", lambda arguments=arguments: side.wrap(net, **arguments))
    side_of_strategy = Side(side.kind, side.rank, side.originals, "HYBRID_SHARD")
    assert side_of_strategy.strategy is hybrid
    yield says("hybrid by hand", lambda: side_of_strategy.wrap(Net()))
    yield says("hybrid, one group", lambda: side_of_strategy.wrap(Net(), process_group=group))
    yield says("hybrid, one dimension", lambda: side_of_strategy.wrap(Net(), device_mesh=mesh))
    yield says("group and mesh", lambda: side.wrap(Net(), process_group=group, device_mesh=mesh))
    with torch.device("meta"):
        meta = Net()
    held = Net()
    held.exit.weight = nn.Parameter(TwoTensor(*[held.exit.weight.detach()] * 2))
    yield says("tensor subclass", lambda: run(side, held))
    yield says("no function", lambda: side.wrap(meta, param_init_fn=3))


def inside_of_forward(side: Side, what: str) -> Iterator[tuple[str, Any]]:
    summon = side.api.FullyShardedDataParallel.summon_full_params
    calls: dict[str, Callable[[], Any]] = {
        "summon": lambda: summon(side.model).__enter__(),
        "state_dict": lambda: side.model.state_dict(),
        "apply": lambda: side.model.apply(lambda module: None),
    }
    side.model = side.wrap(Net())

    def call(*_: Any) -> None:
        calls[what]()

    side.model.module.exit.register_forward_hook(call)
    yield what, attempt(lambda: side.loss(0))


def calling(side: Side) -> Iterator[tuple[str, Any]]:
    wrapper = side.api.FullyShardedDataParallel
    side.build()
    side.loss(0).backward()
    inner = side.net.layers[0]

    def hook(state: Any, gradient: torch.Tensor, output: torch.Tensor) -> None:
        output.zero_()

    yield "hook, inner", attempt(lambda: inner.register_comm_hook(None, hook))
    yield "hook, no function", attempt(lambda: side.model.register_comm_hook(None, 3))
    side.model.register_comm_hook(None, hook)
    yield "hook, twice", attempt(lambda: side.model.register_comm_hook(None, hook))
    yield "no_sync, inner", attempt(lambda: inner.no_sync().__enter__())
    yield "clip, inner", attempt(lambda: inner.clip_grad_norm_(1.0))
    both = wrapper.summon_full_params(side.model, rank0_only=True)
    yield "rank0_only and writeback", attempt(both.__enter__)
    with wrapper.summon_full_params(side.model):
        yield "summon in summon", attempt(wrapper.summon_full_params(side.model).__enter__)
        yield "summon in summon, inner", attempt(wrapper.summon_full_params(inner).__enter__)
        yield "apply in summon", attempt(lambda: side.model.apply(lambda module: None))
        yield "keys in summon", str(list(side.model.state_dict()))
    single = side.wrap(Net(), auto_wrap_policy=side.policy())
    single.module.layers[0](torch.ones(2, 8)).sum().backward()
    yield "inner ran as a root", attempt(lambda: single(torch.ones(2, 8)))


def case_refusals(rank: int) -> None:
    for originals in (False, True):
        compare(wrapping, rank, originals)
        compare(calling, rank, originals)
        for what in ("summon", "state_dict", "apply"):
            compare(inside_of_forward, rank, originals, what=what)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = Side("impl", rank, False, "HYBRID_SHARD").wrap(Net(), device_mesh=mesh)
    with pytest.raises(AssertionError, match="HYBRID_SHARD, which reduces twice"):
        hybrid.register_comm_hook(None, lambda *_: None)
    side = Side("impl", rank, True).build()
    with impl.FullyShardedDataParallel.summon_full_params(side.model):
        with pytest.raises(AssertionError, match="leave it before forward"):
            side.loss(0)
    side.loss(0).backward()


def test_refusals(two_ranks) -> None:
    two_ranks.run(case_refusals)


def attributes(side: Side) -> Iterator[tuple[str, Any]]:
    side.build(lambda net: setattr(net, "exit", checkpoint_wrapper(net.exit)))
    model = side.model
    side.loss(0).backward()
    for name in ("rank", "world_size", "forward_prefetch", "limit_all_gathers"):
        yield name, getattr(model, name)
    yield "compute_device", str(model.compute_device)
    yield "cpu_offload", model.cpu_offload.offload_params
    yield "group", model.process_group is dist.group.WORLD
    for name in ("backward_prefetch", "sharding_strategy", "training_state"):
        yield name, getattr(model, name).name
    yield "params", [(tuple(p.shape), p.requires_grad) for p in model.params]
    yield "their values", dict(enumerate(p.detach().clone() for p in model.params))
    yield "their gradients", dict(enumerate(p.grad.clone() for p in model.params))
    yield "module", type(side.wrap(checkpoint_wrapper(nn.Linear(8, 8))).module).__name__
    states = []
    side.net.enter.register_forward_hook(lambda *_: states.append(model.training_state.name))
    loss = side.loss(1)
    states.append(model.training_state.name)
    loss.register_hook(lambda _: None)
    loss.backward()
    with side.api.FullyShardedDataParallel.summon_full_params(model):
        states.append(model.training_state.name)
    yield "states", states


def public(value: Any) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def case_attributes(rank: int) -> None:
    for originals in (False, True):
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            compare(attributes, rank, originals, strategy)
    theirs, ours = (Side(kind, rank, False).build().model for kind in ("torch", "impl"))
    assert not public(theirs) - public(ours)
    assert not public(type(theirs)) - public(type(ours))


def test_attributes(two_ranks) -> None:
    two_ranks.run(case_attributes)


def case_deep_copy(rank: int) -> None:
    """Also after a step, when the memory of parameters was freed: Python's own copy would read it."""
    for originals in (False, True):
        side = Side("impl", rank, originals)
        side.model = side.wrap(Net(), auto_wrap_policy=side.policy())
        for _ in range(2):
            with pytest.raises(TypeError, match="does not support deepcopy"):
                copy.deepcopy(nn.Sequential(side.model))
            side.loss(0).backward()


def test_deep_copy(two_ranks) -> None:
    two_ranks.run(case_deep_copy)


def case_alone(rank: int) -> None:
    model = impl.FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU, use_orig_params=True)
    assert model.sharding_strategy is impl.ShardingStrategy.NO_SHARD
    assert (model.rank, model.world_size) == (0, 1)
    assert model.module.weight.shape == (2, 2)


def test_one_rank_shards_nothing(one_rank) -> None:
    one_rank.run(case_alone)
