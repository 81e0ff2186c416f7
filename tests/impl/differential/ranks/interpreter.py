"""Carries out operations on one side; what comes back is what can be seen of them. Runs inside the ranks."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from functools import singledispatch
from typing import Any

import torch
from differential import operations as ops
from differential.ranks.models import Model, batch_of, loss_of, plain_blocks
from differential.ranks.naming import watched
from differential.ranks.observing import Seen, topics_of, value_of
from differential.ranks.trail import Trail
from differential.ranks.wrapping import api_of, build
from differential.specs import Flat, Program


class Run:
    """One side's state between operations."""

    def __init__(self, side: str, rank: int, program: Program) -> None:
        self.side, self.rank, self.program = side, rank, program
        self.api: Any = api_of(side)
        self.model: Any = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.losses: list[torch.Tensor] = []
        self.batches = 0
        self.other: Run = self
        """The other side's run; this one where it is alone."""
        self.first = True
        """Whether this side is the first to carry out each operation."""
        self.trail = Trail("", rank)
        self.contexts = ExitStack()
        """What the program entered and did not leave yet."""
        self.cleanups = ExitStack()
        """What has to be undone when the program ends."""
        self.saved: tuple[ops.SaveState, dict[str, Any]] | None = None
        self.saved_optimizer: tuple[ops.SaveOptimizer, dict[str, Any]] | None = None
        self.dtype = program.model.dtype

    @property
    def is_flat(self) -> bool:
        return isinstance(self.program.wrap, Flat)

    @property
    def plain(self) -> Model:
        """The model itself, under its wrapper."""
        return next(module for module in self.model.modules() if isinstance(module, Model))

    def build(self) -> None:
        self.model, self.optimizer, self.losses = build(self.side, self.program), None, []

    def make_optimizer(self, kind: str) -> None:
        arguments: dict[str, Any] = (
            {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.01, "eps": 0.1}
        )
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), **arguments)


def carry_out(run: Run, operation: ops.Operation | None) -> tuple[Seen, str]:
    """What is seen of an operation (``None`` is wrapping), and the words of its exception."""
    torch.manual_seed(11)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen: Seen = {}
            if operation is None:
                run.build()
            else:
                seen = perform(operation, run)
            words = ""
            seen = {"error": "", **seen}
        except Exception as error:
            seen, words = {"error": type(error).__name__}, str(error)
    if words:  # which warnings come first is of no meaning where it is refused
        return seen, words
    return {**seen, "warned": topics_of([str(each.message) for each in caught])}, words


@singledispatch
def perform(operation: Any, run: Run) -> Seen:
    raise NotImplementedError(type(operation).__name__)


@perform.register
def _(operation: ops.Forward, run: Run) -> Seen:
    run.plain.skipped = operation.skip
    for index, block in enumerate(plain_blocks(run.model)):
        block.uses_branch = operation.branch
        block.fails_forward = index == operation.fail
    batch = batch_of(run.rank, run.batches, run.program.model).to(getattr(torch, run.dtype))
    batch.requires_grad_(operation.input_grad)
    run.batches += 1
    modes: dict[str, Any] = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[operation.mode](), watched(run.model) as names:
        output = run.model(batch)
        loss = loss_of(output)
    if loss.requires_grad:
        run.losses.append(loss)
    return {"loss": loss.item(), "requires_grad": loss.requires_grad, **names}


@perform.register
def _(operation: ops.Backward, run: Run) -> Seen:
    if not run.losses:
        return {}
    for index, block in enumerate(plain_blocks(run.model)):
        block.fails_backward = index == operation.fail
    place = 0 if operation.oldest else -1
    loss = run.losses[place] if operation.retain else run.losses.pop(place)
    loss.backward(retain_graph=operation.retain)
    return {}


@perform.register
def _(operation: ops.MakeOptimizer, run: Run) -> Seen:
    run.make_optimizer(operation.kind)
    return {}


@perform.register
def _(operation: ops.Step, run: Run) -> Seen:
    if run.optimizer is None:
        run.make_optimizer("SGD")
    assert run.optimizer is not None
    run.optimizer.step()
    return {}


@perform.register
def _(operation: ops.ZeroGrad, run: Run) -> Seen:
    if operation.of_model or run.optimizer is None:
        run.model.zero_grad(set_to_none=operation.to_none)
    else:
        run.optimizer.zero_grad(set_to_none=operation.to_none)
    return {}


@perform.register
def _(operation: ops.SetTraining, run: Run) -> Seen:
    run.model.train(operation.training)
    return {}


def whole_parameters(run: Run) -> Seen:
    """Every parameter whole, as this side's API gives it, or the exception of that."""
    found: Seen = {}
    try:
        if not run.is_flat:
            for name, parameter in run.model.named_parameters():
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                found[f"whole {name}"] = value_of(whole)
            return found
        summon = run.api.FullyShardedDataParallel.summon_full_params
        grads = run.program.wrap.originals
        with summon(run.model, writeback=False, with_grads=grads):
            for name, parameter in run.model.named_parameters():
                found[f"whole {name}"] = value_of(parameter)
                found[f"whole grad {name}"] = value_of(parameter.grad)
    except Exception as error:
        return {"whole error": type(error).__name__}
    return found
