"""Autograd and streams: hooks, functions of one's own, gradients that another stream uses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from seeded import bug
from torch import nn


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).cuda()


@bug("race", "wait_stream")
def gradients_used_beside_backward(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = small(), torch.randn(8, 32, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        model(x).sum().backward()  # first
    if fixed:
        main.wait_stream(side)
    torch._foreach_norm([p.grad for p in model.parameters()])  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def forward_on_a_side_stream_loss_on_the_main_one(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = small(), torch.randn(8, 32, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        out = model(x)  # first
    if fixed:
        main.wait_stream(side)
    out.sum().backward()  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def gradient_scaled_on_a_side_stream_in_a_hook(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = small(), torch.randn(8, 32, device="cuda")
    side.wait_stream(main)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if fixed:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            scaled = grad * 0.5  # second
        torch.cuda.current_stream().wait_stream(side)
        grad.record_stream(side)
        scaled.record_stream(torch.cuda.current_stream())
        return scaled

    model[0].weight.register_hook(hook)
    model(x).sum().backward()  # first


@bug("race", "wait_stream")
def reduced_in_hooks_and_not_waited_for(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, x = small(), torch.randn(8, 32, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def reduce(parameter: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_reduce(parameter.grad)  # first
            parameter.grad.record_stream(side)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    model(x).sum().backward()
    if fixed:
        main.wait_stream(side)
    optimizer.step()  # second
    main.wait_stream(side)


@bug("read_before_ready", "wait()")
def works_of_hooks_dropped(fixed: bool) -> None:
    model, x, works = small(), torch.randn(8, 32, device="cuda"), []

    def reduce(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))  # first

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    model(x).sum().backward()
    for work in works if fixed else works[:-1]:
        work.wait()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # second


@bug("read_before_ready", "wait()")
def second_microbatch_adds_to_what_is_reduced(fixed: bool) -> None:
    """Gradient accumulation with a reduction that is left running."""
    model, works = small(), []
    for _ in range(2):
        for work in works if fixed else ():
            work.wait()
        model(torch.randn(8, 32, device="cuda")).sum().backward()  # second
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]  # first
    for work in works:
        work.wait()


class SideLinear(torch.autograd.Function):
    """A product whose weight's gradient is computed beside that of the input."""

    side: Any = None
    fixed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        main, side = torch.cuda.current_stream(), SideLinear.side
        side.wait_stream(main)
        with torch.cuda.stream(side):
            grad_weight = x.T @ grad
        for tensor in (x, grad):
            tensor.record_stream(side)
        grad_weight.record_stream(main)
        grad_x = grad @ weight.T
        if SideLinear.fixed:
            main.wait_stream(side)
        return grad_x, grad_weight


@bug("race", "wait_stream")
def weight_gradient_on_a_side_stream(fixed: bool) -> None:
    SideLinear.side, SideLinear.fixed = torch.cuda.Stream(), fixed
    weight = torch.randn(32, 32, device="cuda", requires_grad=True)
    x = torch.randn(8, 32, device="cuda", requires_grad=True)
    SideLinear.apply(x, weight).sum().backward()  # first
    weight.grad.norm()  # second
    torch.cuda.current_stream().wait_stream(SideLinear.side)


class SideExpert(torch.autograd.Function):
    """Forward on a side stream, without a word to who uses its output."""

    side: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fixed: bool) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), SideExpert.side
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = x.sigmoid()
        if fixed:
            main.wait_stream(side)
        x.record_stream(side)
        out.record_stream(main)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2, None


@bug("race", "wait_stream")
def function_that_computes_on_a_side_stream(fixed: bool) -> None:
    SideExpert.side = torch.cuda.Stream()
    x = torch.randn(8, 32, device="cuda", requires_grad=True)
    out = SideExpert.apply(x, fixed)  # first
    out.sum().backward()  # second
    torch.cuda.current_stream().wait_stream(SideExpert.side)


@bug("race", "wait_stream")
def two_branches_write_one_gradient_buffer(fixed: bool) -> None:
    """Gradients copied into a flat buffer on two streams, at places that overlap by an element."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    flat = torch.zeros(2048, device="cuda")
    a, b = torch.randn(2, 32, 32, device="cuda").unbind()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        flat[:1024].copy_(a.reshape(-1))  # first
    start = 1024 if fixed else 1023
    flat[start : start + 1024].copy_(b.reshape(-1))  # second
    main.wait_stream(side)


@bug("use_after_free", "record_stream")
def gradient_dropped_while_it_is_reduced(fixed: bool) -> None:
    """`zero_grad` frees the gradient that the side stream still reads."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model = nn.Linear(512, 512, bias=False).cuda()
    total = torch.zeros((), device="cuda")
    for _ in range(2):
        model(torch.randn(8, 512, device="cuda")).sum().backward()  # second
        side.wait_stream(main)
        with torch.cuda.stream(side):
            total.add_(model.weight.grad.square().sum())  # first
        if fixed:
            model.weight.grad.record_stream(side)
        model.zero_grad()
    main.wait_stream(side)


@bug("race", "wait_stream")
def statistics_of_activations_in_a_forward_hook(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    layer, seen = nn.Linear(64, 64).cuda(), torch.zeros(8, 64, device="cuda")
    side.wait_stream(main)

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if fixed:
            side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            seen.add_(out)  # second
        out.record_stream(side)

    layer.register_forward_hook(hook)
    layer(torch.randn(8, 64, device="cuda"))  # first
    main.wait_stream(side)


@bug("race", "wait_stream")
def statistics_of_gradients_in_a_backward_hook(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    layer, seen = nn.Linear(64, 64).cuda(), torch.zeros(8, 64, device="cuda")
    side.wait_stream(main)

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if fixed:
            side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            seen.add_(outputs[0])  # second
        outputs[0].record_stream(side)

    layer.register_full_backward_hook(hook)
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    (layer(x) * layer(x)).sum().backward()  # first
    main.wait_stream(side)
