"""Optimizers, averages, clipping and checkpoints beside the training."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from seeded import bug
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
    return model, torch.randn(8, 64, device="cuda")


def optimizer_on_side(model: nn.Module, x: torch.Tensor, fixed: bool, **options: Any) -> None:
    """Steps on a side stream; unless `fixed`, forward does not wait for them."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        if fixed:
            main.wait_stream(side)
        optimizer.zero_grad(set_to_none=False)
        model(x).sum().backward()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            optimizer.step()
    main.wait_stream(side)


@bug("race", "wait_stream")
def step_before_backward_is_done(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()  # first
    if fixed:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        optimizer.step()  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def next_forward_beside_the_step(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).sum().backward()  # second
        side.wait_stream(main)
        with torch.cuda.stream(side):
            optimizer.step()  # first
        if fixed:
            main.wait_stream(side)
        optimizer.zero_grad(set_to_none=False)
    main.wait_stream(side)


@bug("race", "wait_stream")
def foreach_step_on_a_side_stream(fixed: bool) -> None:
    model, x = model_and_batch()
    optimizer_on_side(model, x, fixed, foreach=True)  # first # second


@bug("race", "wait_stream")
def fused_step_on_a_side_stream(fixed: bool) -> None:
    model, x = model_and_batch()
    optimizer_on_side(model, x, fixed, fused=True)  # first # second


@bug("race", "wait_stream")
def average_taken_while_the_next_step_writes(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).sum().backward()
        if fixed:
            main.wait_stream(side)
        optimizer.step()  # second
        side.wait_stream(main)
        with torch.no_grad(), torch.cuda.stream(side):
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.01)  # first
    main.wait_stream(side)


@bug("race", "wait_stream")
def clipped_on_another_stream(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # first
    if fixed:
        main.wait_stream(side)
    optimizer.step()  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def checkpoint_copied_while_the_optimizer_writes(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = {k: torch.empty(v.shape, pin_memory=True) for k, v in model.state_dict().items()}
    model(x).sum().backward()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for name, value in model.state_dict().items():
            saved[name].copy_(value, non_blocking=True)  # first
    if fixed:
        main.wait_stream(side)
    optimizer.step()  # second
    main.wait_stream(side)


@bug("read_before_ready", "synchronize")
def checkpoint_written_before_it_has_arrived(fixed: bool) -> None:
    model, _ = model_and_batch()
    saved = {k: v.to("cpu", non_blocking=True) for k, v in model.state_dict().items()}  # first
    if fixed:
        torch.cuda.synchronize()
    torch.save(saved, "/dev/null")  # second


@bug("race", "wait_stream")
def local_part_written_beside_the_whole(fixed: bool) -> None:
    mesh = dist.device_mesh.init_device_mesh("cuda", (8,))
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 64, device="cuda"), mesh, [Shard(0)]))
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.no_grad(), torch.cuda.stream(side):
        weight.to_local().mul_(0.9)  # first
    if fixed:
        main.wait_stream(side)
    weight.full_tensor().sum()  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def gradients_zeroed_while_they_are_read(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    history = torch.zeros(4, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        norms = torch._foreach_norm([p.grad for p in model.parameters()])  # first
        torch.stack(norms, out=history)
    if fixed:
        main.wait_stream(side)
    optimizer.zero_grad(set_to_none=False)  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def learning_rate_tensor_changed_beside_the_step(fixed: bool) -> None:
    """A capturable optimizer reads its learning rate on the device."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    rate = torch.tensor(0.1, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.param_groups[0]["lr"] = rate
    model(x).sum().backward()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        optimizer.step()  # first
    if fixed:
        main.wait_stream(side)
    rate.mul_(0.99)  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def averaged_model_updated_beside_the_step(fixed: bool) -> None:
    """`torch.optim.swa_utils`, on a side stream."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    for _ in range(2):
        optimizer.step()  # second
        side.wait_stream(main)
        with torch.cuda.stream(side):
            averaged.update_parameters(model)  # first
        if fixed:
            main.wait_stream(side)
    main.wait_stream(side)


@bug("race", "wait_stream")
def state_dict_loaded_beside_forward(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = model_and_batch()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    side.wait_stream(main)
    with torch.cuda.stream(side):
        model.load_state_dict(saved)  # first
    if fixed:
        main.wait_stream(side)
    model(x)  # second
    main.wait_stream(side)
