"""Situations while a model of ``FullyShardedDataParallel`` is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from flat_programs import Side
from outcomes.flat_calling_rows import batch, nested
from outcomes.rows import Table
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

TABLE = Table()
row = TABLE.row
BOTH = {"modes": (False, True)}

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
        for _end, _only in (("", ""), ("_of_a_unit", "unit")):
            _program = {f"{_how}_{_strategy}{_end}": _written(_how, _strategy, _only)}
            TABLE.family(
                "written_",
                _program,
                modes=(False, True),
                quick=_strategy == "SHARD_GRAD_OP" and not _only and _how in ("in_place", "data", "replaced"),
            )


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
    copy.deepcopy(nested(side))


@row(**BOTH)
def attribute_unknown(side: Side) -> str:
    return str(nested(side).nonsense)


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
            _name = f"{_p}_{_r}_{_k}".replace("torch.", "")
            _quick = _p is torch.bfloat16 and _r in (None, torch.float32) and not _k
            TABLE.family("no_sync_", {_name: _program}, modes=(False, True), quick=_quick)
