"""Operations on whole parameters and state dicts. Runs inside the ranks."""

from __future__ import annotations

from typing import Any

import torch
from differential import operations as ops
from differential.ranks.interpreter import Run, perform
from differential.ranks.naming import names_seen
from differential.ranks.observing import Seen, plain, value_of
from torch.distributed.checkpoint import state_dict as dcp


@perform.register
def _(operation: ops.Summon, run: Run) -> Seen:
    seen: Seen = {}
    summon = run.api.FullyShardedDataParallel.summon_full_params(
        run.model,
        recurse=operation.recurse,
        writeback=operation.writeback,
        rank0_only=operation.rank0_only,
        offload_to_cpu=operation.offload,
        with_grads=operation.with_grads,
    )
    with summon:
        names = names_seen(run.model, in_flight=False)
        seen |= {f"summoned {key}": value for key, value in names.items()}
        for name, parameter in run.model.named_parameters():
            name = plain(name) if name.endswith("_flat_param") else name  # what is not summoned
            seen[f"summoned {name}"] = value_of(parameter)
            if operation.with_grads:
                seen[f"summoned grad {name}"] = value_of(parameter.grad)
            if operation.change:
                with torch.no_grad():
                    parameter.mul_(0.5)
    return seen


def flat_type(run: Run, kind: str, offload: bool = False, rank0_only: bool = False) -> Any:
    api = run.api
    types = api.StateDictType
    if kind == "full":
        settings = (
            types.FULL_STATE_DICT,
            api.FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only),
            api.FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        )
    elif kind == "sharded":
        settings = (
            types.SHARDED_STATE_DICT,
            api.ShardedStateDictConfig(offload_to_cpu=offload),
            api.ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
    else:
        settings = (types.LOCAL_STATE_DICT, None, None)
    return api.FullyShardedDataParallel.state_dict_type(run.model, *settings)


def _options(kind: str, offload: bool = False) -> Any:
    return dcp.StateDictOptions(full_state_dict=kind == "full", cpu_offload=offload)


def model_state(run: Run, operation: ops.SaveState) -> dict[str, Any]:
    """A state dict of that kind."""
    if run.is_flat:
        with flat_type(run, operation.kind, operation.offload, operation.rank0_only):
            return run.model.state_dict()
    if operation.kind in ("full", "sharded"):
        return dcp.get_model_state_dict(run.model, options=_options(operation.kind, operation.offload))
    return run.model.state_dict()


def seen_of(name: str, state: dict[str, Any]) -> Seen:
    """Keys in their order, and every value."""
    seen: Seen = {f"{name} keys": list(state)}
    return {**seen, **{f"{name} {key}": value_of(value) for key, value in state.items()}}


@perform.register
def _(operation: ops.SaveState, run: Run) -> Seen:
    run.saved = None
    state = model_state(run, operation)
    seen = seen_of("state", state)
    run.saved = (operation, {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()})
    return seen


@perform.register
def _(operation: ops.LoadState, run: Run) -> Seen:
    source = run.other if operation.other else run
    if run.saved is None or run.other.saved is None or run.saved[0].rank0_only:
        return {}
    assert source.saved is not None
    how, kept = source.saved
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
    if operation.missing and state:
        del state[next(iter(state))]
    if run.is_flat:
        with flat_type(run, how.kind):
            answer = run.model.load_state_dict(state, strict=not operation.missing)
    elif how.kind in ("full", "sharded"):
        full = how.kind == "full"
        options = dcp.StateDictOptions(
            full_state_dict=full,
            strict=not operation.missing,
            broadcast_from_rank0=full and how.offload,  # then rank 0 alone has it
        )
        answer = dcp.set_model_state_dict(run.model, state, options=options)
    else:
        answer = run.model.load_state_dict(state, strict=not operation.missing, assign=operation.assign)
    return {"missing": sorted(answer.missing_keys), "unexpected": sorted(answer.unexpected_keys)}


def optimizer_state(run: Run, kind: str) -> dict[str, Any]:
    if run.is_flat:
        with flat_type(run, kind):
            return run.api.FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
    return dcp.get_optimizer_state_dict(run.model, run.optimizer, options=_options(kind))


@perform.register
def _(operation: ops.SaveOptimizer, run: Run) -> Seen:
    run.saved_optimizer = None
    if run.optimizer is None:
        return {}
    state = optimizer_state(run, operation.kind)
    seen: Seen = {"optimizer keys": list(state), "optimizer parameters": sorted(map(str, state["state"]))}
    for name, values in state["state"].items():
        for key, value in values.items():
            seen[f"optimizer {name} {key}"] = value_of(value)
    for index, group in enumerate(state["param_groups"]):
        seen[f"group {index}"] = {k: str(v) for k, v in group.items()}
    run.saved_optimizer = (operation, state)
    return seen


@perform.register
def _(operation: ops.LoadOptimizer, run: Run) -> Seen:
    source = run.other if operation.other else run
    if run.saved_optimizer is None or run.other.saved_optimizer is None or run.optimizer is None:
        return {}
    how, state = source.saved_optimizer
    if run.is_flat:
        wrapper = run.api.FullyShardedDataParallel
        with flat_type(run, how.kind):
            flattened = wrapper.optim_state_dict_to_load(run.model, run.optimizer, state)
        run.optimizer.load_state_dict(flattened)
    else:
        dcp.set_optimizer_state_dict(run.model, run.optimizer, state, options=_options(how.kind))
    return {}
