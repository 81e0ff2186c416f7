"""Programs whose forward and backward run on several streams, all of them right: no finding."""

from __future__ import annotations

from typing import Any

import torch
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
