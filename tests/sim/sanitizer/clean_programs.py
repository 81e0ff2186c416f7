"""Programs with streams that are right, each with something that looks wrong. They must give no finding."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from seeded import clean
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class TwoBranches(nn.Module):
    """The branch on the side stream waits and is waited for; backward needs no word of it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            right = self.right(x).relu()
        left = self.left(x).relu()
        main.wait_stream(self.side)
        x.record_stream(self.side)
        right.record_stream(main)
        return left * right


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@clean
def two_branches() -> None:
    train(nn.Sequential(TwoBranches(), nn.Linear(64, 64), TwoBranches()).cuda())


@clean
def two_branches_checkpointed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([TwoBranches(), TwoBranches()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    train(Model().cuda())


@clean
def two_branches_checkpointed_reentrant() -> None:
    model = TwoBranches().cuda()
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    for _ in range(2):
        checkpoint(model, x, use_reentrant=True).sum().backward()


@clean
def two_branches_sharded() -> None:
    model = nn.Sequential(TwoBranches(), TwoBranches()).cuda()
    for block in model:
        fully_shard(block)
    train(fully_shard(model))


@clean
def two_branches_with_ddp() -> None:
    train(DistributedDataParallel(nn.Sequential(TwoBranches(), TwoBranches()).cuda()))


@clean
def forward_and_backward_on_a_side_stream_throughout() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda())


@clean
def forward_on_the_main_stream_backward_on_another() -> None:
    """Nodes run on the streams of forward, and the caller's waits for them."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model = nn.Linear(64, 64).cuda()
    loss = model(torch.randn(16, 64, device="cuda")).sum()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        loss.backward()
        torch._foreach_norm([p.grad for p in model.parameters()])
    torch._foreach_norm([p.grad for p in model.parameters()])
    main.wait_stream(side)


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
def two_streams_read_one_weight() -> None:
    main = torch.cuda.current_stream()
    weight, streams = torch.randn(64, 64, device="cuda"), [torch.cuda.Stream() for _ in range(3)]
    total = [torch.zeros(64, 64, device="cuda") for _ in streams]
    for out, stream in zip(total, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            torch.mm(weight, weight, out=out)
    for stream in streams:
        main.wait_stream(stream)
    sum(total)


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
def one_weight_on_two_streams() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    layer = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            left = layer(x)
        right = layer(x)
        main.wait_stream(side)
        x.record_stream(side)
        left.record_stream(main)
        (left * right).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@clean
def backward_of_backward() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        out = (weight @ weight).tanh()
    main.wait_stream(side)
    out.record_stream(main)
    (grad,) = torch.autograd.grad(out.sum(), weight, create_graph=True)
    (grad * grad).sum().backward(retain_graph=True)
    out.sum().backward()


@clean
def backward_of_two_losses() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    layer, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
    left = layer(x).sum()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        right = layer(x).square().sum()
    main.wait_stream(side)
    right.record_stream(main)
    torch.autograd.backward([left, right])
    layer.weight.grad.norm()


class Fails(torch.autograd.Function):
    """Backward raises once."""

    left = 1

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Fails.left -= 1
        if Fails.left == 0:
            raise ValueError("once")
        return grad * 2


@clean
def backward_that_failed_and_is_repeated() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.randn(8, device="cuda", requires_grad=True)
    Fails.left, failures = 1, 0
    for _ in range(3):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = Fails.apply(weight * 3)
        main.wait_stream(side)
        out.record_stream(main)
        try:
            out.sum().backward()
        except ValueError:
            failures += 1
        assert torch.cuda.current_stream() == main
    assert failures == 1
    weight.grad.norm()


@clean
def stages_of_a_pipeline_on_streams() -> None:
    main, stages = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(2)]
    layers, outs = [nn.Linear(64, 64).cuda() for _ in stages], []
    for stream in stages:
        stream.wait_stream(main)
    for _ in range(4):
        x, before = torch.randn(8, 64, device="cuda"), main
        for stream, layer in zip(stages, layers, strict=True):
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                following = layer(x)
            x.record_stream(stream)
            x, before = following, stream
        main.wait_stream(before)
        x.record_stream(main)
        outs.append(x)
    torch.stack(outs).sum().backward()
    torch._foreach_norm([p.grad for layer in layers for p in layer.parameters()])


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
