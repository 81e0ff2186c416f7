"""Operations on gradients, parameters and settings. Runs inside the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from differential import operations as ops
from differential.ranks.interpreter import Run, perform
from differential.ranks.models import Block, plain_blocks
from differential.ranks.observing import Seen, looked_at, value_of
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward


def target_of(run: Run, block: int | None) -> Any:
    """The root or a block, as it is wrapped."""
    if block is None:
        return run.model
    blocks = run.plain.blocks
    return blocks[block % len(blocks)]


def chosen_parameter(run: Run, index: int) -> tuple[nn.Module, str, nn.Parameter]:
    """The parameter of a number, with its place."""
    places = [
        (module, name, parameter)
        for module in run.model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    return places[index % len(places)]


@perform.register
def _(operation: ops.NoSync, run: Run) -> Seen:
    if run.is_flat:
        run.contexts.close()
        run.contexts = ExitStack()
        if operation.on:
            run.contexts.enter_context(run.model.no_sync())
    else:
        run.model.set_requires_gradient_sync(not operation.on)
    return {}


@perform.register
def _(operation: ops.Setting, run: Run) -> Seen:
    getattr(target_of(run, operation.block), operation.name)(operation.value)
    return {}


@perform.register
def _(operation: ops.Unshard, run: Run) -> Seen:
    handle = target_of(run, operation.block).unshard(async_op=operation.asynchronous)
    if handle is not None:
        handle.wait()
    return {"handle": handle is not None}


@perform.register
def _(operation: ops.Reshard, run: Run) -> Seen:
    target_of(run, operation.block).reshard()
    return {}


@perform.register
def _(operation: ops.ResetIterState, run: Run) -> Seen:
    run.losses.clear()
    run.model.reset_iter_state()
    return {}


@perform.register
def _(operation: ops.RequireGrad, run: Run) -> Seen:
    found = 0
    for name, parameter in target_of(run, operation.block).named_parameters():
        if name.endswith(operation.ending):
            parameter.requires_grad_(operation.value)
            found += 1
    return {"found": found}


@perform.register
def _(operation: ops.Write, run: Run) -> Seen:
    module, name, parameter = chosen_parameter(run, operation.index)
    with torch.no_grad():
        if operation.how == "data":
            parameter.data = parameter.detach() * 0.5
        elif operation.how == "wrong":
            parameter.data = torch.ones(2, 3, 1, dtype=parameter.dtype)
        elif operation.how == "data_copy":
            parameter.data.copy_(parameter.detach() * 0.5)
        elif operation.how == "in_place":
            parameter.mul_(0.5)
        else:
            setattr(module, name, nn.Parameter(parameter.detach() * 0.5, parameter.requires_grad))
    return {}


@perform.register
def _(operation: ops.Clip, run: Run) -> Seen:
    if run.is_flat:
        norm = run.model.clip_grad_norm_(operation.to, operation.norm)
    else:
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), operation.to, operation.norm)
    return {"norm": value_of(norm)}


@perform.register
def _(operation: ops.Copy, run: Run) -> Seen:
    made = copy.deepcopy(run.model)
    return {f"copied {name}": value for name, value in looked_at(made).items()}


@perform.register
def _(operation: ops.OptimizerInBackward, run: Run) -> Seen:
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    if operation.applied:
        _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
        return {}
    for parameter in parameters:
        made = torch.optim.SGD([parameter], lr=0.1)

        def step(p: torch.Tensor, made: Any = made) -> None:
            made.step()
            made.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return {}


def _patched(self: Block, x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 + torch.tanh(self.up(x)).mean(-1, keepdim=True)


@perform.register
def _(operation: ops.Patch, run: Run) -> Seen:
    if not operation.of_class:
        block = plain_blocks(run.model)[0]
        block.forward = _patched.__get__(block)
    elif run.first:  # a class is patched for both
        run.cleanups.enter_context(_patched_class())
    return {}


@contextmanager
def _patched_class() -> Iterator[None]:
    original = Block.forward
    Block.forward = _patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Block.forward = original  # type: ignore[method-assign]


@perform.register
def _(operation: ops.Convert, run: Run) -> Seen:
    run.model.to(getattr(torch, operation.dtype))
    run.dtype = operation.dtype
    return {}


@perform.register
def _(operation: ops.Apply, run: Run) -> Seen:
    @torch.no_grad()
    def halve(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.mul_(0.5)

    run.model.apply(halve)
    return {}


FLAT_ATTRIBUTES = (
    "rank", "world_size", "cpu_offload", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
    "training_state", "compute_device", "sharding_strategy", "mixed_precision", "params",
)  # fmt: skip


@perform.register
def _(operation: ops.Attributes, run: Run) -> Seen:
    seen: Seen = {"print": str(run.model)}
    if not run.is_flat:
        return {**seen, "class": type(run.model).__name__}
    for name in FLAT_ATTRIBUTES:
        value = getattr(run.model, name)
        seen[f"attribute {name}"] = len(value) if name == "params" else str(value)
    seen["group"] = run.model.process_group.size()
    seen["root"] = run.model.check_is_root()
    seen["modules"] = len(run.api.FullyShardedDataParallel.fsdp_modules(run.model))
    return seen
