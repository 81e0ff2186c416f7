"""Drawn orders of what a training script does to a model, carried out on the plain and on a wrapped one.

Writes go to the parameters that the script holds: the plain model's, or each rank's part.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from values.shapes import WIDTH, batch_of
from values.wraps import is_flat


class Net(nn.Module):
    """Three blocks between a stem and a head."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.fails = -1
        self.skips = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index == self.fails:
                raise ArithmeticError("on purpose")
            if index == self.skips:
                continue
            if self.how in ("reentrant", "non-reentrant"):
                x = x + checkpoint(block, x, use_reentrant=self.how == "reentrant")
            elif self.how == "no_grad part" and index == 0:
                with torch.no_grad():
                    x = block(x) + x
            else:
                x = x + block(x)
        return self.head(x)


def net_of(model: nn.Module) -> Net:
    return next(module for module in model.modules() if isinstance(module, Net))


class Run:
    """One model between two operations."""

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        self.model = model
        self.losses: list[torch.Tensor] = []
        self.batches = 0
        self.named = list(model.named_parameters())
        self.held = [parameter for _, parameter in self.named]
        arguments: dict[str, Any] = {"foreach": True} if optimizer == "foreach" else {}
        kind = torch.optim.SGD
        if optimizer.startswith("fused"):
            kind, arguments = torch.optim.AdamW, {"fused": True, "eps": 0.1}
        if optimizer == "fused, no decay":
            arguments["weight_decay"] = 0.0
        self.optimizer = kind(self.held, lr=0.1, **arguments)
        self.saved: Any = None

    def forward(self) -> torch.Tensor:
        self.batches += 1
        return self.model(batch_of(self.batches)).square().mean()

    def units(self) -> list[Any]:
        return [module for module in self.model.modules() if hasattr(module, "unshard")]


Operation = Callable[[Run], dict[str, Any]]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


@operation
def forward(run: Run) -> dict[str, Any]:
    loss = run.forward()
    run.losses.append(loss)
    return {"loss": loss}


@operation
def no_grad(run: Run) -> dict[str, Any]:
    with torch.no_grad():
        return {"loss": run.forward()}


@operation
def inference(run: Run) -> dict[str, Any]:
    with torch.inference_mode():
        return {"loss": torch.tensor(run.forward().item())}


@operation
def grad_disabled(run: Run) -> dict[str, Any]:
    with torch.set_grad_enabled(False):
        return {"loss": run.forward()}


@operation
def backward(run: Run) -> dict[str, Any]:
    if run.losses:
        run.losses.pop().backward()
    return {}


@operation
def oldest_backward(run: Run) -> dict[str, Any]:
    if run.losses:
        run.losses.pop(0).backward()
    return {}


@operation
def retained_backward(run: Run) -> dict[str, Any]:
    if run.losses:
        run.losses[-1].backward(retain_graph=True)
    return {}


@operation
def partial_backward(run: Run) -> dict[str, Any]:
    """Two losses of one forward, each with a backward of its own."""
    run.batches += 1
    output = run.model(batch_of(run.batches))
    output[:2].square().mean().backward(retain_graph=True)
    output[2:].square().mean().backward()
    return {}


@operation
def sum_of_two(run: Run) -> dict[str, Any]:
    (run.forward() + run.forward()).backward()
    return {}


@operation
def penalised(run: Run) -> dict[str, Any]:
    """The gradient of the inputs, without one of the parameters."""
    run.batches += 1
    batch = batch_of(run.batches).requires_grad_()
    (gradient,) = torch.autograd.grad(run.model(batch).sum(), batch)
    return {"gradient": gradient}


@operation
def step(run: Run) -> dict[str, Any]:
    run.optimizer.step()
    return {}


@operation
def zero(run: Run) -> dict[str, Any]:
    run.optimizer.zero_grad()
    return {}


@operation
def halve(run: Run) -> dict[str, Any]:
    with torch.no_grad():
        for parameter in run.held:
            parameter.mul_(0.5)
    return {}


@operation
def halve_data(run: Run) -> dict[str, Any]:
    for parameter in run.held:
        parameter.data.mul_(0.5)
    return {}


@operation
def new_data(run: Run) -> dict[str, Any]:
    if hasattr(run.held[0], "device_mesh"):  # a DTensor's .data cannot be assigned to the rows alone
        return halve(run)
    for parameter in run.held:
        parameter.data = parameter.data * 0.5
    return {}


def require_gradients(run: Run, value: bool, part: str = "") -> dict[str, Any]:
    """Freeze or thaw what the script holds of a part of the model; "root" is what is in no block."""
    for name, parameter in run.named:
        if part in name or (part == "root" and "blocks." not in name):
            parameter.requires_grad_(value)
    return {}


@operation
def freeze_root(run: Run) -> dict[str, Any]:
    return require_gradients(run, False, "root")


@operation
def freeze_block(run: Run) -> dict[str, Any]:
    return require_gradients(run, False, "blocks.1.")


@operation
def thaw(run: Run) -> dict[str, Any]:
    return require_gradients(run, True)


@operation
def frozen_forward(run: Run) -> dict[str, Any]:
    """A forward of frozen parts, which no backward follows and which may leave them gathered."""
    require_gradients(run, False, "root")
    require_gradients(run, False, "blocks.1.")
    loss = run.forward()
    require_gradients(run, True)
    return {"loss": loss}


@operation
def thawed_by_a_hook(run: Run) -> dict[str, Any]:
    """A block that its forward's pre-hook thaws, when it may have been gathered ahead."""
    require_gradients(run, False, "blocks.1.")
    block = net_of(run.model).blocks[1]
    handle = block.register_forward_pre_hook(lambda module, _: module.requires_grad_(True) and None)
    run.forward().backward()
    handle.remove()
    return require_gradients(run, True)


@operation
def halve_gradients(run: Run) -> dict[str, Any]:
    for parameter in run.held:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    return {}


@operation
def drop_gradients_of_a_block(run: Run) -> dict[str, Any]:
    for name, parameter in run.named:
        if "blocks.1." in name:
            parameter.grad = None
    return {}


@operation
def clip(run: Run) -> dict[str, Any]:
    if is_flat(run.model):
        run.model.clip_grad_norm_(0.01)
    else:
        torch.nn.utils.clip_grad_norm_(run.held, 0.01)
    return {}


@operation
def averaged(run: Run) -> dict[str, Any]:
    """An exponential average is kept, and copied in."""
    with torch.no_grad():
        averages = [parameter.detach().clone() for parameter in run.held]
        torch._foreach_mul_(averages, 0.9)
        for parameter, average in zip(run.held, averages, strict=True):
            parameter.copy_(average)
    return {}


@operation
def save(run: Run) -> dict[str, Any]:
    run.saved = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    return {}


@operation
def load(run: Run) -> dict[str, Any]:
    if run.saved is not None:
        run.model.load_state_dict(run.saved)
    return {}


@operation
def unshard(run: Run) -> dict[str, Any]:
    for unit in run.units():
        unit.unshard()
    return {}


@operation
def unshard_later(run: Run) -> dict[str, Any]:
    for unit in run.units():
        unit.unshard(async_op=True)
    return {}


@operation
def reshard(run: Run) -> dict[str, Any]:
    for unit in run.units():
        unit.reshard()
    return {}


@operation
def keep_after_backward(run: Run) -> dict[str, Any]:
    for unit in run.units():
        unit.set_reshard_after_backward(False, recurse=False)
    return {}


@operation
def accumulate(run: Run) -> dict[str, Any]:
    """A microbatch without communication, then one with it."""
    with run.model.no_sync() if is_flat(run.model) else nullcontext():
        for unit in run.units():
            unit.set_requires_gradient_sync(False, recurse=False)
        run.forward().backward()
    for unit in run.units():
        unit.set_requires_gradient_sync(True, recurse=False)
    run.forward().backward()
    return {}


@operation
def failing_forward(run: Run) -> dict[str, Any]:
    net_of(run.model).fails = 1
    with suppress(ArithmeticError):
        run.forward()
    net_of(run.model).fails = -1
    return {}


@operation
def dropped_forward(run: Run) -> dict[str, Any]:
    """A forward with gradients enabled, whose graph is dropped."""
    return {"loss": run.forward().detach()}


@operation
def gradient_of_inputs(run: Run) -> dict[str, Any]:
    run.batches += 1
    batch = batch_of(run.batches).requires_grad_()
    run.model(batch).square().mean().backward()
    return {"gradient": batch.grad}


@operation
def block_alone(run: Run) -> dict[str, Any]:
    """A block called by itself, once the whole model ran."""
    if run.batches == 0:
        return {}
    run.batches += 1
    output = net_of(run.model).blocks[2](batch_of(run.batches))
    output.square().mean().backward()
    return {"output": output.detach()}


@operation
def loss_inside(run: Run) -> dict[str, Any]:
    """A hook of the user keeps what a block returns, for a loss of it."""
    kept: list[torch.Tensor] = []
    handle = net_of(run.model).blocks[0].register_forward_hook(lambda *call: kept.append(call[2]))
    loss = run.forward()
    handle.remove()
    if kept and kept[0].requires_grad:
        loss = loss + kept[0].square().mean()
    loss.backward()
    return {"loss": loss}


@operation
def converted(run: Run) -> dict[str, Any]:
    run.model.double()
    run.model.float()
    return {}


@operation
def restored_optimizer(run: Run) -> dict[str, Any]:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return {}


@operation
def to_zero(run: Run) -> dict[str, Any]:
    run.optimizer.zero_grad(set_to_none=False)
    return {}


@operation
def summoned_and_written(run: Run) -> dict[str, Any]:
    """Parameters are changed where they are whole, or else in place."""
    if not is_flat(run.model):
        return halve(run)
    with type(run.model).summon_full_params(run.model), torch.no_grad():  # type: ignore[attr-defined]
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    return {}


@operation
def skipping(run: Run) -> dict[str, Any]:
    net_of(run.model).skips = 1
    run.forward().backward()
    net_of(run.model).skips = -1
    return {}


OFTEN = ("forward", "backward", "step", "no_grad", "zero")


def drawn(number: int) -> tuple[str, ...]:
    """The names of the operations of a seed."""
    choice = random.Random(number)
    names = [*OPERATIONS, *OFTEN, *OFTEN]
    return tuple(choice.choice(names) for _ in range(choice.randint(4, 10)))


def program_of(
    names: tuple[str, ...], optimizer: str = ""
) -> Callable[[nn.Module], Iterator[dict[str, Any]]]:
    """The operations as a program; each shows its values, and a last forward and backward follow."""

    def program(model: nn.Module) -> Iterator[dict[str, Any]]:
        run = Run(model, optimizer)
        for name in names:
            yield OPERATIONS[name](run)
        run.optimizer.zero_grad()
        loss = run.forward()
        loss.backward()
        yield {"loss": loss}

    return program
