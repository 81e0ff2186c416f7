"""Situations where ``FullyShardedDataParallel`` is called in the wrong place, or with unusual arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from flat_programs import Net, Side
from outcomes.flat_wrapping_rows import linear, two, x
from outcomes.rows import Table, outcome
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

TABLE = Table()
row = TABLE.row
BOTH = {"modes": (False, True)}


def nested(side: Side, strategy: str = "FULL_SHARD", **arguments: Any) -> Any:
    side.strategy = side.api.ShardingStrategy[strategy]
    return side.build(**arguments).model


def batch(side: Side, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7 * step + side.rank))


# -- calls in forward and backward --

CALLS: dict[str, Callable[[Side, Any], Any]] = {
    "summon": lambda side, model: side.api.FullyShardedDataParallel.summon_full_params(model).__enter__(),
    "summon_rank0": lambda side, model: side.api.FullyShardedDataParallel.summon_full_params(
        model, rank0_only=True
    ).__enter__(),
    "summon_not_recursive": lambda side, model: side.api.FullyShardedDataParallel.summon_full_params(
        model, recurse=False
    ).__enter__(),
    "apply": lambda side, model: model.apply(lambda module: None) and None,
    "no_sync": lambda side, model: model.no_sync().__enter__(),
    "clip": lambda side, model: model.clip_grad_norm_(1.0) and None,
    "hook": lambda side, model: model.register_comm_hook(None, lambda *_: None),
    "root": lambda side, model: model.check_is_root(),
    "optim": lambda side, model: side.api.FullyShardedDataParallel.optim_state_dict(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    ) and None,
    "get_type": lambda side, model: side.api.FullyShardedDataParallel.get_state_dict_type(
        model
    ).state_dict_type.name,
    "train": lambda side, model: model.train() and None,
    "modules": lambda side, model: len(side.api.FullyShardedDataParallel.fsdp_modules(model)),
}  # fmt: skip


def _in_forward(call: Callable[[Side, Any], Any], inner: bool) -> Any:
    def program(side: Side) -> str:
        model = nested(side)
        found: list[str] = []
        target = side.net.layers[0] if inner else model
        side.net.exit.register_forward_hook(lambda *_: found.append(outcome(lambda: call(side, target))))
        model(batch(side))
        return found[0]

    return program


def _in_backward(call: Callable[[Side, Any], Any], inner: bool) -> Any:
    def program(side: Side) -> str:
        model = nested(side)
        found: list[str] = []
        target = side.net.layers[0] if inner else model

        def look(*_: Any) -> None:
            found.append(outcome(lambda: call(side, target)))

        side.net.enter.register_forward_hook(lambda _, __, y: y.register_hook(look) and None)
        model(batch(side)).sum().backward()
        return found[0]

    return program


def _between(call: Callable[[Side, Any], Any], inner: bool) -> Any:
    def program(side: Side) -> str:
        model = nested(side)
        waiting = [model(batch(side)).sum()]
        said = outcome(lambda: call(side, side.net.layers[0] if inner else model))
        waiting.clear()
        return said

    return program


def _in_summon(call: Callable[[Side, Any], Any], inner: bool) -> Any:
    def program(side: Side) -> str:
        model = nested(side)
        with side.api.FullyShardedDataParallel.summon_full_params(model):
            return outcome(lambda: call(side, side.net.layers[0] if inner else model))

    return program


def _in_apply(call: Callable[[Side, Any], Any], inner: bool) -> Any:
    def program(side: Side) -> str:
        model = nested(side)
        found: list[str] = []
        target = side.net.layers[0] if inner else model

        def look(module: nn.Module) -> None:
            if isinstance(module, Net):
                found.append(outcome(lambda: call(side, target)))

        model.apply(look)
        return found[0]

    return program


PLACES = {
    "forward": _in_forward, "backward": _in_backward, "between": _between, "summon": _in_summon,
    "apply": _in_apply,
}  # fmt: skip
for _place, _made in PLACES.items():
    for _end, _inner in (("", False), ("_of_a_unit_inside", True)):
        _quick = _place in ("forward", "backward") and not _inner
        for _call in CALLS:
            _named = {f"{_call}_in_{_place}{_end}": _made(CALLS[_call], _inner)}
            TABLE.family("", _named, modes=(False, True), quick=_quick and _call in ("summon", "apply"))


# -- calls outside --


def _outside(call: Callable[[Side, Any], Any], inner: bool, first: bool) -> Any:
    def program(side: Side) -> str:
        model = nested(side)
        if not first:
            model(batch(side)).sum().backward()
        return outcome(lambda: call(side, side.net.layers[0] if inner else model))

    return program


for _call in ("no_sync", "clip", "hook", "summon_rank0", "root", "apply"):
    for _inner in (False, True):
        for _first in (False, True):
            _name = f"{_call}{'_first' if _first else ''}{'_of_a_unit_inside' if _inner else '_of_the_root'}"
            TABLE.family("", {_name: _outside(CALLS[_call], _inner, _first)}, modes=(False, True))


def _summon(**arguments: Any) -> Any:
    def program(side: Side) -> None:
        model = nested(side)
        with side.api.FullyShardedDataParallel.summon_full_params(model, **arguments):
            pass

    return program


SUMMONS: dict[str, Any] = {
    "rank0": {"rank0_only": True, "writeback": False},
    "rank0_and_writeback": {"rank0_only": True},
    "grads": {"with_grads": True},
    "not_recursive": {"recurse": False},
}
TABLE.family("summon_", {name: _summon(**value) for name, value in SUMMONS.items()}, modes=(False, True))


@row()
def summon_without_wrappers(side: Side) -> None:
    with side.api.FullyShardedDataParallel.summon_full_params(two()):
        pass


@row(**BOTH)
def summon_raises_inside(side: Side) -> None:
    with side.api.FullyShardedDataParallel.summon_full_params(nested(side)):
        raise LookupError


@row(**BOTH)
def summon_inner_then_forward(side: Side) -> None:
    model = nested(side)
    with side.api.FullyShardedDataParallel.summon_full_params(side.net.layers[0]):
        pass
    model(batch(side)).sum().backward()


# -- clipping --


@row(**BOTH, quick=True)
def clip_without_gradients(side: Side) -> str:
    return str(nested(side).clip_grad_norm_(1.0))


@row(**BOTH)
def clip_after_zero_grad(side: Side) -> str:
    model = nested(side)
    model(batch(side)).sum().backward()
    model.zero_grad()
    return str(model.clip_grad_norm_(1.0))


def _clip(*arguments: Any) -> Any:
    def program(side: Side) -> None:
        model = nested(side)
        model(batch(side)).sum().backward()
        model.clip_grad_norm_(*arguments)

    return program


CLIPS: dict[str, Any] = {
    "text": ("a",), "text_norm": (1.0, "x"), "inf_text": (1.0, "inf"), "zero": (1.0, 0.0),
    "negative": (1.0, -1.0), "none": (None,), "tensor": (torch.tensor(1.0),),
}  # fmt: skip
TABLE.family("clip_", {name: _clip(*value) for name, value in CLIPS.items()})


@row(**BOTH)
def clip_low_precision(side: Side) -> str:
    precision = side.api.MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = nested(side, mixed_precision=precision)
    model(batch(side)).float().sum().backward()
    return str(model.clip_grad_norm_(1.0).dtype)


# -- communication hooks --


def reduce_scatter(state: Any, gradient: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(gradient.chunk(2)[dist.get_rank()])


def all_reduce(state: Any, gradient: torch.Tensor) -> None:
    gradient.mul_(1.0)


def _hook(hook: Any, strategy: str) -> Any:
    def program(side: Side) -> str:
        model = nested(side, strategy)
        return outcome(lambda: model.register_comm_hook(None, hook)) + outcome(
            lambda: model(batch(side)).sum().backward()
        )

    return program


HOOKS: dict[str, Any] = {
    "number": 3, "none": None, "sharded": reduce_scatter, "replicas": all_reduce,
    "no_arguments": lambda: None, "four": lambda a, b, c, d: None,
}  # fmt: skip
for _strategy in ("FULL_SHARD", "NO_SHARD"):
    _hooked = {f"{name}_{_strategy}": _hook(value, _strategy) for name, value in HOOKS.items()}
    TABLE.family("hook_", _hooked, modes=(False, True))


@row(**BOTH)
def hook_on_a_unit_first(side: Side) -> str:
    model = nested(side)
    said = [outcome(lambda: side.net.layers[0].register_comm_hook(None, reduce_scatter))]
    said.append(outcome(lambda: model.register_comm_hook(None, reduce_scatter)))
    return str(said)


@row(**BOTH)
def hook_on_a_unit_then_forward(side: Side) -> str:
    model = nested(side)
    said = [outcome(lambda: side.net.layers[0].register_comm_hook(None, reduce_scatter))]
    said.append(outcome(lambda: model(batch(side)).sum().backward()))
    return str(said)


@row(**BOTH)
def hook_before_wrapped_again(side: Side) -> str:
    inner = side.wrap(linear())
    said = [outcome(lambda: inner.register_comm_hook(None, reduce_scatter))]
    model = side.wrap(nn.Sequential(inner, linear()))
    said.append(outcome(lambda: model(x()).sum().backward()))
    return str(said)


@row(**BOTH)
def hook_twice(side: Side) -> None:
    model = nested(side)
    model.register_comm_hook(None, reduce_scatter)
    model.register_comm_hook(None, reduce_scatter)


@row(**BOTH)
def hook_after_backward(side: Side) -> None:
    model = nested(side)
    model(batch(side)).sum().backward()
    model.register_comm_hook(None, reduce_scatter)
    model(batch(side)).sum().backward()


def _mixed_root(root: str, inside: str, hook: Any) -> Any:
    def program(side: Side) -> str:
        kinds = side.api.ShardingStrategy
        net = two()
        side.strategy = kinds[inside]
        net[0] = side.wrap(net[0])
        side.strategy = kinds[root]
        model = side.wrap(net)
        said = [outcome(lambda: model.register_comm_hook(None, hook))]
        said.append(outcome(lambda: model(x()).sum().backward()))
        return str(said)

    return program


for _name, _function in {"sharded": reduce_scatter, "replicas": all_reduce}.items():
    for _root, _inside in (("NO_SHARD", "FULL_SHARD"), ("FULL_SHARD", "NO_SHARD")):
        _program = _mixed_root(_root, _inside, _function)
        TABLE.family(
            "hook_", {f"{_name}_root_{_root}": _program}, modes=(False, True), quick=_name == "sharded"
        )


@row(**BOTH, quick=True)
def hook_sharded_root_without_parameters(side: Side) -> str:
    kinds = side.api.ShardingStrategy
    net = two()
    net[0], net[1] = side.wrap(net[0]), side.wrap(net[1])
    side.strategy = kinds.NO_SHARD
    model = side.wrap(net)
    said = [outcome(lambda: model.register_comm_hook(None, reduce_scatter))]
    said.append(outcome(lambda: model(x()).sum().backward()))
    return str(said)


@row()
def hook_hybrid(side: Side) -> None:
    side.strategy = side.api.ShardingStrategy.HYBRID_SHARD
    side.wrap(linear(), device_mesh=init_device_mesh("cpu", (1, 2))).register_comm_hook(None, reduce_scatter)
