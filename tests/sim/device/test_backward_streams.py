"""Backward runs each node on the stream of its forward, behind the nodes before it, as CUDA's engine does."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.simulated


class _Tells(torch.autograd.Function):
    """Notes the stream that its backward runs on."""

    @staticmethod
    def forward(ctx, tensor, name, seen):
        ctx.name, ctx.seen = name, seen
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen[ctx.name] = torch.sim.current_stream().stream_id
        return gradient.clone(), None, None


def test_nodes_run_on_the_streams_of_forward() -> None:
    from device_training import start

    start()
    side, other, seen = torch.sim.Stream(), torch.sim.Stream(), {}
    tensor = torch.randn(64, 64, device="sim", requires_grad=True)
    first = _Tells.apply(tensor, "main", seen)
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        second = _Tells.apply(first, "side", seen)
    torch.sim.current_stream().wait_stream(side)
    third = _Tells.apply(second, "main again", seen)
    with torch.sim.stream(other):
        third.sum().backward()
        assert torch.sim.current_stream() == other
    assert seen == {"main": 0, "side": side.stream_id, "main again": 0}


def test_hooks_run_there_too() -> None:
    from device_training import start

    start()
    side, seen = torch.sim.Stream(), []
    tensor = torch.randn(64, 64, device="sim", requires_grad=True)
    with torch.sim.stream(side):
        made = tensor * 2
        made.register_hook(lambda gradient: seen.append(torch.sim.current_stream().stream_id))
        result = made * 3
    result.sum().backward()
    assert seen == [side.stream_id]


@pytest.mark.parametrize("callers", [True, False])
def test_engine_waits_order_all_of_it(callers: bool) -> None:
    """Parallel branches on two streams: backward is ordered without a word of the program, and so is what
    the caller does with the gradients; what another stream does with them is not."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "sanitizer"))
    from sanitized import kinds, start

    sanitizer = start()
    main, side = torch.sim.current_stream(), torch.sim.Stream()
    weights = [torch.randn(64, 64, device="sim", requires_grad=True) for _ in range(2)]
    for _ in range(3):
        batch = torch.randn(64, 64, device="sim")
        side.wait_stream(main)
        left = batch @ weights[0]
        with torch.sim.stream(side):
            right = batch @ weights[1]
        main.wait_stream(side)
        right.record_stream(main)
        batch.record_stream(side)
        (left * right).sum().backward()
        with torch.no_grad(), torch.sim.stream(main if callers else side):
            weight = weights[1 if callers else 0]  # its gradient was made on the other stream
            weight.sub_(weight.grad)
        main.wait_stream(side)
        for weight in weights:
            weight.grad = None
    found = kinds(sanitizer)
    assert found == [] if callers else "race" in found


def test_one_stream_costs_no_look_at_nodes() -> None:
    """Training on one stream never asks autograd where it is."""
    from device_training import start

    from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

    start()
    layer = torch.nn.Linear(8, 8, device="sim")
    asked: list[int] = []
    ACCELERATOR.backward.arrive = lambda: asked.append(1)  # type: ignore[method-assign]
    for _ in range(2):
        layer(torch.randn(2, 8, device="sim")).sum().backward()
    assert not asked
