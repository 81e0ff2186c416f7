"""Programs with streams that are right, each with something that looks wrong. They must give no finding."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from seeded import clean
from torch import nn


@clean
def fused_step_only_reads_gradients() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch._foreach_norm([p.grad for p in model.parameters()])
        optimizer.step()
        main.wait_stream(side)
        optimizer.zero_grad(set_to_none=False)


@clean
def an_order_that_goes_around() -> None:
    """Main to left to right to main: no wait between main and the others' ends, and none needed."""
    main, left, right = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.randn(64, device="cuda")
    left.wait_stream(main)
    with torch.cuda.stream(left):
        x.mul_(2)
    right.wait_stream(left)
    with torch.cuda.stream(right):
        x.add_(1)
    main.wait_stream(right)
    x.neg_()


@clean
def event_asked_until_it_has_passed() -> None:
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    x, shown = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        shown.copy_(x, non_blocking=True)
        done.record()
    while not done.query():
        pass
    shown.sum()
    x.zero_()


@clean
def freed_after_the_cpu_has_waited() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.sum()
    side.synchronize()
    del x
    torch.zeros(512, 512, device="cuda")


@clean
def reused_by_the_stream_that_owns_it() -> None:
    """Temporaries of a side stream come back to that stream alone."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            torch.randn(512, 512, device="cuda").square().sum()


@clean
def freed_to_the_driver() -> None:
    """`cudaFree` waits for the device, so that `empty_cache` orders what comes after."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(4 << 20, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.sum()
    del x
    torch.cuda.empty_cache()
    torch.zeros(5 << 20, device="cuda")
    main.wait_stream(side)


@clean
def works_of_one_group_in_a_row() -> None:
    """One communicator's collectives share a stream: the last one's wait covers all."""
    grads = [torch.randn(256, device="cuda") for _ in range(4)]
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    works[-1].wait()
    torch._foreach_div_(grads, 8)


@clean
def chain_of_futures() -> None:
    grad = torch.randn(256, device="cuda")
    future = dist.all_reduce(grad, async_op=True).get_future()
    future.then(lambda done: done.value()[0].div_(8)).then(lambda done: done.value().mul_(2)).wait()
    grad.norm()


@clean
def functional_collectives() -> None:
    from torch.distributed import _functional_collectives as functional

    x = torch.randn(256, device="cuda")
    reduced = functional.all_reduce(x, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    reduced.mul_(2).sum() + gathered.sum()


@clean
def tensor_handed_back_and_forth() -> None:
    """A ring of buffers with an event for each direction, the classic of producers and consumers."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    ring = [torch.empty(1024, device="cuda") for _ in range(3)]
    filled, used = [torch.cuda.Event() for _ in ring], [torch.cuda.Event() for _ in ring]
    side.wait_stream(main)
    for step in range(9):
        slot = step % 3
        with torch.cuda.stream(side):
            side.wait_event(used[slot])
            ring[slot].fill_(step)
            filled[slot].record()
        main.wait_event(filled[slot])
        ring[slot].sum()
        used[slot].record()


@clean
def optimizer_in_backward_on_a_side_stream() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(side: Any, parameter: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizers[parameter].step()
        parameter.grad.record_stream(side)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(step, side))
    for _ in range(3):
        main.wait_stream(side)
        model(torch.randn(16, 64, device="cuda")).sum().backward()
    main.wait_stream(side)


@clean
def saved_on_cpu() -> None:
    """torch's own activation offload."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(torch.randn(16, 64, device="cuda")).sum()
        loss.backward()


@clean
def losses_logged_one_step_late() -> None:
    slots = [torch.zeros((), pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in slots]
    for step in range(5):
        if step > 1:
            events[step % 2].synchronize()
            float(slots[step % 2])
        loss = torch.randn(100, device="cuda").mean()
        slots[step % 2].copy_(loss, non_blocking=True)
        events[step % 2].record()


@clean
def pageable_memory_is_copied_before_the_call_returns() -> None:
    buffer = torch.zeros(1024)
    for step in range(3):
        buffer.fill_(step)
        buffer.to("cuda", non_blocking=True).sum()


@clean
def ring_in_one_pinned_buffer() -> None:
    ring = torch.zeros(4, 1024).pin_memory()
    for slot in range(4):
        ring[slot].fill_(slot)
        ring[slot].to("cuda", non_blocking=True).sum()


@clean
def columns_of_two_streams() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    table = torch.randn(64, 200, device="cuda")
    side.wait_stream(main)
    for column in range(0, 200, 2):
        with torch.cuda.stream(side):
            table[:, column].mul_(2)
        table[:, column + 1].mul_(2)
    main.wait_stream(side)
    table.sum()


@clean
def pinned_memory_dropped_at_once() -> None:
    """torch keeps pinned memory until the copies from and to it are done."""
    for _ in range(4):
        torch.zeros(1024).pin_memory().cuda(non_blocking=True)
        torch.randn(1024, device="cuda").to("cpu", non_blocking=True)
