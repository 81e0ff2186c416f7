"""What a hook raises inside of backward comes out of it, as on a GPU: the process goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.simulated


class OfHookError(Exception):
    """Raised by what backward calls."""


def fail(*arguments: object) -> None:
    try:
        raise KeyError("before")
    except KeyError as error:
        raise OfHookError("of a hook") from error


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        fail()


def tensor_hook(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    y.register_hook(fail)
    return y


def module_hook(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.register_full_backward_hook(fail)
    y: torch.Tensor = model(x)
    return y


def accumulated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    next(model.parameters()).register_post_accumulate_grad_hook(fail)
    y: torch.Tensor = model(x)
    return y


def saved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        y: torch.Tensor = model(x)
    return y


def function(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = Failing.apply(model(x))
    return y


def recomputed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(lambda x: tensor_hook(model, x), x, use_reentrant=False)
    return y


def reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor) -> torch.Tensor:
        return tensor_hook(model, x) if torch.is_grad_enabled() else model(x)

    y: torch.Tensor = checkpoint(block, x, use_reentrant=True)
    return y


def on_another_stream(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    stream = torch.sim.Stream()
    stream.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(stream):
        y = tensor_hook(model, x)
    torch.sim.current_stream().wait_stream(stream)
    return y


Way = Callable[[nn.Module, torch.Tensor], torch.Tensor]
ALL: tuple[Way, ...] = (
    tensor_hook, module_hook, accumulated, saved, function, recomputed, reentrant, on_another_stream,
)  # fmt: skip
WAYS = {way.__name__: way for way in ALL}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_raised_as_it_is(way: str) -> None:
    from device_training import start

    start()
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU()).to("sim")
    x = torch.randn(4, 16, device="sim", requires_grad=True)
    loss = WAYS[way](model, x).sum()
    for _ in range(2):  # the graph is there the second time, too
        with pytest.raises(OfHookError, match="of a hook") as raised:
            loss.backward(retain_graph=True)
        assert isinstance(raised.value.__cause__, KeyError)
        assert "fail" in [entry.name for entry in raised.traceback]
    after = nn.Linear(16, 16).to("sim")
    after(x.detach()).sum().backward()
    assert after.weight.grad is not None


def test_memory_that_is_out_can_be_caught() -> None:
    from device_training import start

    start()
    model = nn.Linear(16, 16).to("sim")
    y = model(torch.randn(4, 16, device="sim"))
    y.register_hook(lambda gradient: torch.empty(1 << 45, device="sim"))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.autograd.grad(y.sum(), list(model.parameters()))


def test_errors_of_the_engine_itself_stay() -> None:
    from device_training import start

    start()
    y = nn.Linear(16, 16).to("sim")(torch.randn(4, 16, device="sim")).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
