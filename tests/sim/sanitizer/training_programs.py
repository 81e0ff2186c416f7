"""Small training programs: each way in which they order streams, or need FSDP and DDP to do so."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from trained_models import WIDTH, Training


def train(training: Training) -> None:
    training.loss().backward()
    training.step()


def accumulate(training: Training) -> None:
    for _ in range(3):
        training.loss().backward()
    training.step()


def _sync(model: Any, on: bool) -> Any:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if on else model.no_sync()


def accumulate_without_sync(training: Training) -> None:
    for last in (False, False, True):
        with _sync(training.model, last):
            training.loss().backward()
    training.step()


def accumulate_without_all_reduce(training: Training) -> None:
    for last in (False, False, True):
        training.model.set_requires_all_reduce(last)
        training.loss().backward()
    training.step()


def last_backward_by_hand(training: Training) -> None:
    for last in (False, False, True):
        training.model.set_is_last_backward(last)
        training.loss().backward()
    training.step()


def clip(training: Training) -> None:
    training.loss().backward()
    if hasattr(training.model, "clip_grad_norm_"):
        training.model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.step()


def save_between(training: Training) -> None:
    training.loss().backward()
    state = training.model.state_dict()
    training.step()
    training.model.load_state_dict(state)
    training.optimizer.state_dict()
    training.loss().backward()
    training.step()


def unshard_by_hand(training: Training) -> None:
    model = training.model
    model.unshard()
    handles = [block.unshard(async_op=True) for block in model.blocks]
    handles[0].wait()
    training.loss().backward()
    for block in (*model.blocks, model):
        block.reshard()
    training.step()
    model.blocks[1].unshard()
    model.blocks[1].reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.blocks[2].unshard(async_op=True)
    training.loss().backward()
    training.optimizer.zero_grad()


def event_after_the_optimizer(training: Training) -> None:
    """Work between the event and forward is not waited for."""
    training.loss().backward()
    training.optimizer.step()
    training.model.set_post_optim_event(torch.sim.current_stream().record_event())
    training.optimizer.zero_grad()


def unshard_privately(training: Training) -> None:
    """What torch's FSDP1 offers to other parts of torch: before forward, and from within it."""
    train(training)  # makes the streams
    blocks = training.model.blocks

    def gather_ahead(*_: Any) -> None:
        blocks[2]._unshard(async_op=True)

    blocks[0]._wait_unshard_streams_on_current_stream()
    blocks[0]._unshard()
    blocks[0]._handle.flat_param.detach().sum()
    handle = blocks[1].register_forward_hook(gather_ahead)
    train(training)
    handle.remove()


def load_after_evaluation(training: Training) -> None:
    train(training)
    state = training.model.state_dict()
    with torch.no_grad():
        training.loss()
    training.model.load_state_dict(state)
    with torch.no_grad():
        training.loss()
    with type(training.model).summon_full_params(training.model):
        for parameter in training.model.parameters():
            parameter.data.mul_(0.5)


def scale(training: Training) -> None:
    """With a gradient scaler that looks for overflows on all ranks."""
    if training.scaler is None:
        training.scaler = _scaler_of(training.model)("sim", process_group=dist.group.WORLD)
    training.scaler.scale(training.loss()).backward()
    training.scaler.unscale_(training.optimizer)
    training.step()
    training.scaler.update()


def _scaler_of(model: Any) -> Any:
    if type(model).__module__.startswith("torch."):
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler
    from fsdpbench import impl

    return impl.ShardedGradScaler


def save_optimizer_between(training: Training) -> None:
    train(training)
    kind = type(training.model)
    state = kind.optim_state_dict(training.model, training.optimizer)
    loaded = kind.optim_state_dict_to_load(training.model, training.optimizer, state)
    training.optimizer.load_state_dict(loaded)
    train(training)


def unshard_after_the_optimizer(training: Training) -> None:
    training.loss().backward()
    training.optimizer.step()
    training.model.blocks[0].unshard()
    training.model.blocks[1].unshard(async_op=True)
    training.optimizer.zero_grad()
    training.loss().backward()
    training.step()
    training.model.blocks[3].unshard(async_op=True)  # not waited for by hand


def unshard_before_the_optimizer(training: Training) -> None:
    """Gathered, and written to: the handle is waited for between."""
    training.loss().backward()
    training.model.blocks[1].unshard(async_op=True).wait()
    training.model.blocks[0].unshard()
    training.step()
    for block in training.model.blocks[:2]:
        block.reshard()


def write_between(training: Training) -> None:
    """After forward, before backward gathers again."""
    value = training.loss()
    for module in (*training.model.blocks, training.model):
        module.reshard()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)
    value.backward()
    training.step()


def write_data_between(training: Training) -> None:
    """As `write_between`, past the version counters that show it."""
    value = training.loss()
    for module in (*training.model.blocks, training.model):
        module.reshard()
    for parameter in training.model.parameters():
        parameter.data.mul_(0.5)
    value.backward()
    training.step()


def write_after_evaluation(training: Training) -> None:
    train(training)
    with torch.no_grad():
        training.loss()
        for parameter in training.model.parameters():
            parameter.mul_(0.5)


def write_while_accumulating(training: Training) -> None:
    for last in (False, True):
        with _sync(training.model, last):
            training.loss().backward()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(0.5)
    training.step()


def assign_between(training: Training) -> None:
    """Other values for parameters, after a step and between forward and backward."""
    train(training)
    _assign(training.model)
    value = training.loss()
    _assign(training.model)
    value.backward()
    training.step()


def assign_instead_of_backward(training: Training) -> None:
    """Other values for parameters, after a step and after a forward that has no backward."""
    train(training)
    _assign(training.model)
    training.loss()
    _assign(training.model)
    train(training)


def _assign(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


def summon(training: Training) -> None:
    training.loss().backward()
    with type(training.model).summon_full_params(training.model, writeback=True):
        for parameter in training.model.parameters():
            parameter.data.mul_(0.5)
    training.step()


def summon_gradients(training: Training) -> None:
    training.loss().backward()
    with type(training.model).summon_full_params(training.model, with_grads=True):
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    training.step()


def two_forwards(training: Training) -> None:
    first, second = training.loss(), training.loss()
    (first + second).backward()
    training.step()


def backward_twice(training: Training) -> None:
    value = training.loss()
    value.backward(retain_graph=True)
    training.optimizer.step()
    value.backward()
    training.step()


def evaluate_between(training: Training) -> None:
    training.loss().backward()
    training.model.eval()
    with torch.no_grad():
        training.loss()
    training.model.train()
    training.step()
    with torch.no_grad():
        training.loss()


def evaluate_after(training: Training) -> None:
    train(training)
    with torch.no_grad():
        training.loss()


def optimizer_in_backward(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.requires_grad and not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(_descend)
    training.loss().backward()
    training.loss().backward()


def _descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def chunk_by_chunk(training: Training) -> None:
    """A block that is wrapped together with another, called alone: its part of the loss, in pieces."""
    output = training.model(torch.randn(16, WIDTH, device=training.device))
    start = output.detach().requires_grad_()
    for part in start.chunk(2):
        training.model.blocks[1](part).sum().backward()
    output.backward(start.grad)
    training.step()


def fail_in_forward(training: Training) -> None:
    """A forward that fails, and the next iteration."""
    handle = training.model.blocks[2].register_forward_pre_hook(_fail)
    with contextlib.suppress(ValueError):
        training.loss()
    handle.remove()
    _recover(training)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _fail()


def fail_in_backward(training: Training) -> None:
    """A backward that fails, and the next iteration."""
    handle = training.model.blocks[1].down.register_forward_hook(lambda _, __, output: _Fail.apply(output))
    with contextlib.suppress(ValueError):
        training.loss().backward()
    handle.remove()
    _recover(training)


def fail_and_write(training: Training) -> None:
    """A forward that fails, and parameters that are written by hand."""
    train(training)
    handle = training.model.blocks[2].register_forward_pre_hook(_fail)
    with contextlib.suppress(ValueError):
        training.loss()
    handle.remove()
    training.model.reset_iter_state()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)


def give_up_a_backward(training: Training) -> None:
    """Gradients on their way are dropped, and the next iteration begins."""
    training.model.set_is_last_backward(False)
    training.loss().backward()
    training.model.set_is_last_backward(True)
    _recover(training)


def _recover(training: Training) -> None:
    if hasattr(training.model, "reset_iter_state"):
        training.model.reset_iter_state()
    training.optimizer.zero_grad()
    train(training)


def _fail(*_: Any) -> None:
    raise ValueError("on purpose")
