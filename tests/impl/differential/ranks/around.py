"""Carries out the operations of ``differential.around``. Runs inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from differential import operations as ops
from differential.around import CallInside, DamagedOptimizer, Hook, OptimizerOrder, OrderedOptimizer
from differential.ranks.interpreter import Run, perform
from differential.ranks.models import plain_blocks
from differential.ranks.observing import Seen
from differential.ranks.saving import flat_type, optimizer_state
from differential.ranks.training import target_of
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.tensor import DTensor


@perform.register
def _(operation: OrderedOptimizer, run: Run) -> Seen:
    parameters = list(run.model.parameters())
    given = parameters[::-1] if run.rank % 2 else parameters
    run.optimizer = getattr(torch.optim, operation.kind)(given, lr=0.01)
    return {}


@perform.register
def _(operation: OptimizerOrder, run: Run) -> Seen:
    state = optimizer_state(run, operation.kind)["state"]
    for values in state.values():
        for value in values.values():
            if isinstance(value, DTensor):
                value.full_tensor()  # a collective: ranks of another order would wait for each other
    return {"order": list(state)}


@perform.register
def _(operation: DamagedOptimizer, run: Run) -> Seen:
    saved = optimizer_state(run, operation.kind)
    state = {name: dict(values) for name, values in saved["state"].items()}
    if not state:
        return {}
    first = next(iter(state))
    damaged: Any = state
    if operation.how == "in_a_list":
        damaged = {name: [values] for name, values in state.items()}
    elif operation.how == "value_nested":
        damaged = {name: {key: {"value": v} for key, v in values.items()} for name, values in state.items()}
    elif operation.how == "one_missing":
        del state[first]
    elif operation.how == "one_state_missing":
        state[first].pop("exp_avg", None)
    elif operation.how == "outer_nested":
        damaged = {"optimizer": state}
    else:
        keys = sorted({key for values in state.values() for key in values})
        damaged = {key: {name: v[key] for name, v in state.items() if key in v} for key in keys}
    fsdp = run.api.FullyShardedDataParallel
    with flat_type(run, operation.kind):
        fsdp.optim_state_dict_to_load(run.model, run.optimizer, {**saved, "state": damaged})
    return {}


@perform.register
def _(operation: Hook, run: Run) -> Seen:
    hook = default_hooks.reduce_scatter_hook if operation.sharded else default_hooks.allreduce_hook
    target_of(run, operation.block).register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
    return {}


def _call(run: Run, operation: CallInside) -> str:
    target = target_of(run, operation.block)
    calls = {
        "summon": lambda: run.api.FullyShardedDataParallel.summon_full_params(target).__enter__(),
        "apply": lambda: target.apply(lambda module: None),
        "state_dict": lambda: target.state_dict(),
        "hook": lambda: target.register_comm_hook(None, 3),
    }
    if not hasattr(target, "sharding_strategy"):
        return "not wrapped"
    try:
        calls[operation.call]()
    except Exception as error:
        return type(error).__name__
    return "done"


@perform.register
def _(operation: CallInside, run: Run) -> Seen:
    said: set[str] = set()

    def look(*_: Any) -> None:
        said.add(_call(run, operation))

    def attach(module: Any, arguments: Any, output: torch.Tensor) -> None:
        if not operation.backward:
            look()
        elif output.requires_grad:
            output.register_hook(look)

    handle = plain_blocks(run.model)[-1].register_forward_hook(attach)
    try:
        seen = perform(ops.Forward(), run)
        perform(ops.Backward(), run)
    finally:
        handle.remove()
    return {**seen, "said": sorted(said)}
