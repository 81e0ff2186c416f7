"""Situations while a model of ``FullyShardedDataParallel`` is trained, summoned and looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from flat_programs import Net, Side
from outcomes.flat_wrapping_rows import linear, trained, two, x
from outcomes.rows import FLAT_DOC, Table, outcome
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

TABLE = Table(FLAT_DOC)
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
    "zero": lambda side, model: model.zero_grad(),
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
        loss = model(batch(side)).sum()
        return outcome(lambda: call(side, side.net.layers[0] if inner else model))

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
    for _call, _function in CALLS.items():
        for _inner in (False, True):
            _program = _made(_function, _inner)
            _program.__name__ = f"{_call}_in_{_place}{'_of_a_unit_inside' if _inner else ''}"
            row(**BOTH)(_program)


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
            _program = _outside(CALLS[_call], _inner, _first)
            _program.__name__ = f"{_call}{'_first' if _first else ''}{'_of_a_unit_inside' if _inner else ''}"
            row(**BOTH)(_program)


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
for _name, _value in SUMMONS.items():
    _program = _summon(**_value)
    _program.__name__ = f"summon_{_name}"
    row(**BOTH)(_program)


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


@row(**BOTH)
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


for _name, _value in {
    "text": ("a",), "text_norm": (1.0, "x"), "inf_text": (1.0, "inf"), "zero": (1.0, 0.0),
    "negative": (1.0, -1.0), "none": (None,), "tensor": (torch.tensor(1.0),),
}.items():  # fmt: skip
    _program = _clip(*_value)
    _program.__name__ = f"clip_{_name}"
    row()(_program)


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


for _name, _value in {
    "number": 3, "none": None, "sharded": reduce_scatter, "replicas": all_reduce, "no_arguments": lambda: None,
    "four": lambda a, b, c, d: None,
}.items():  # fmt: skip
    for _strategy in ("FULL_SHARD", "NO_SHARD"):
        _program = _hook(_value, _strategy)
        _program.__name__ = f"hook_{_name}_{_strategy}"
        row(**BOTH)(_program)


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


for _name, _hooked in {"sharded": reduce_scatter, "replicas": all_reduce}.items():
    for _root, _inside in (("NO_SHARD", "FULL_SHARD"), ("FULL_SHARD", "NO_SHARD")):
        _program = _mixed_root(_root, _inside, _hooked)
        _program.__name__ = f"hook_{_name}_root_{_root}"
        row(**BOTH)(_program)


@row(**BOTH)
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
    from torch.distributed.device_mesh import init_device_mesh

    side.strategy = side.api.ShardingStrategy.HYBRID_SHARD
    side.wrap(linear(), device_mesh=init_device_mesh("cpu", (1, 2))).register_comm_hook(None, reduce_scatter)


# -- training --


WRITES: dict[str, Callable[[nn.Module, str, Any], Any]] = {
    "in_place": lambda module, name, p: p.mul_(0.5),
    "data_in_place": lambda module, name, p: p.data.mul_(0.5),
    "detached": lambda module, name, p: p.detach().mul_(0.5),
    "data": lambda module, name, p: setattr(p, "data", p.detach().clone()),
    "replaced": lambda module, name, p: setattr(module, name, nn.Parameter(p.detach().clone())),
    "removed": lambda module, name, p: setattr(module, name, None),
    "frozen": lambda module, name, p: p.requires_grad_(False),
}


def _written(how: str, strategy: str, only: str = "") -> Any:
    """Parameters, or those of a module, are changed between forward and backward."""

    def program(side: Side) -> None:
        model = nested(side, strategy)
        loss = model(batch(side)).sum()
        with torch.no_grad():
            for module in list(model.modules()):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if not only or module in (
                        side.net.layers[0],
                        side.net.layers[0].module,
                        side.net.layers[0].a,
                    ):
                        WRITES[how](module, name, parameter)
        loss.backward()

    return program


for _strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
    for _how in WRITES:
        for _only in ("", "unit"):
            _program = _written(_how, _strategy, _only)
            _program.__name__ = f"written_{_how}_{_strategy}{_only}"
            row(**BOTH)(_program)


@row(**BOTH)
def backward_twice(side: Side) -> None:
    model = nested(side)
    loss = model(batch(side)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@row(**BOTH)
def backward_twice_without_retaining(side: Side) -> None:
    model = nested(side)
    loss = model(batch(side)).sum()
    loss.backward()
    loss.backward()


@row(**BOTH)
def create_graph(side: Side) -> None:
    model = nested(side)
    model(batch(side)).square().sum().backward(create_graph=True)


@row(**BOTH)
def unit_ran_first(side: Side) -> None:
    model = nested(side)
    side.net.layers[0](batch(side)).sum().backward()
    model(batch(side)).sum().backward()


@row(**BOTH)
def module_inside_called(side: Side) -> None:
    nested(side)
    side.net.layers[0].a(batch(side))


@row(**BOTH)
def forward_in_summon(side: Side) -> None:
    model = nested(side)
    with side.api.FullyShardedDataParallel.summon_full_params(model):
        model(batch(side))


@row(**BOTH)
def to_double(side: Side) -> None:
    model = nested(side).to(torch.float64)
    model(batch(side).double()).sum().backward()


@row(**BOTH)
def to_meta(side: Side) -> None:
    model = nested(side)
    model.to("meta")
    model(batch(side))


@row(**BOTH)
def forward_order_changes(side: Side) -> None:
    model = nested(side)
    for count in (2, 1, 2):
        side.net.count = count
        model(batch(side)).sum().backward()


@row(**BOTH)
def parameter_of_other_size(side: Side) -> None:
    model = nested(side)
    for parameter in model.parameters():
        parameter.data = torch.ones(3, 3)
    model(batch(side)).sum().backward()


@row(**BOTH)
def gradient_of_other_size(side: Side) -> None:
    model = nested(side)
    for parameter in model.parameters():
        parameter.grad = torch.ones(3, 3)
    model(batch(side)).sum().backward()


@row(**BOTH)
def optimizer_in_backward_between(side: Side) -> None:
    model = nested(side)
    model(batch(side)).sum().backward()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model(batch(side)).sum().backward()


@row(**BOTH)
def deep_copy(side: Side) -> None:
    import copy

    copy.deepcopy(nested(side))


@row(**BOTH)
def attribute_unknown(side: Side) -> None:
    nested(side).nonsense


@row(**BOTH)
def index_of_no_container(side: Side) -> None:
    nested(side)[0]


@row(**BOTH)
def get_parameter(side: Side) -> None:
    nested(side).get_parameter("enter.weight")


@row(**BOTH)
def get_submodule(side: Side) -> str:
    return type(nested(side).get_submodule("module.enter")).__name__


def _sync_dtype(**precision: Any) -> Any:
    """Dtypes of visible gradients inside of ``no_sync`` and after it."""

    def program(side: Side) -> str:
        model = nested(side, mixed_precision=side.api.MixedPrecision(**precision))
        found = []
        with model.no_sync():
            for step in range(2):
                model(batch(side, step)).float().sum().backward()
                found.append({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
        model(batch(side, 2)).float().sum().backward()
        found.append({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
        with model.no_sync():
            model(batch(side, 3)).float().sum().backward()
            found.append({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
        return str(found)

    return program


for _p in (None, torch.bfloat16, torch.float16):
    for _r in (None, torch.float32, torch.bfloat16, torch.float16):
        for _k in (False, True):
            _program = _sync_dtype(param_dtype=_p, reduce_dtype=_r, keep_low_precision_grads=_k)
            _program.__name__ = f"no_sync_{_p}_{_r}_{_k}".replace("torch.", "")
            row(**BOTH)(_program)
