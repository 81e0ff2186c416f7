"""Modules on the meta device: which are initialised, in which order, and with which random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flat_programs import CPU, Layer, Net, Side, compare
from torch import nn

Init = Callable[[nn.Module], None]


def materialise(module: nn.Module) -> None:
    """Draw the parameters and buffers of ``module`` itself that have no data."""
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)


def from_above(module: nn.Module) -> None:
    """Materialise whole layers, when the function is called with one; what is left, module by module."""
    if isinstance(module, Layer):
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            nn.init.uniform_(parameter)
    materialise(module)


def everything(module: nn.Module) -> None:
    """Draw all parameters of a module, also those that have data."""
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def meta_model(side: Side, *, init: Init | None, wrapped: str, with_data: bool) -> Iterator[tuple[str, Any]]:
    calls: list[str] = []

    def noted(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        assert init is not None
        init(module)

    torch.manual_seed(0)
    with torch.device("meta"):
        side.net = Net()
    if with_data:
        side.net.layers[1].a = nn.Linear(8, 8)
    policies = {"layers": side.policy_of({Layer}), "linears": side.policy_of({nn.Linear}), "whole": None}
    side.model = side.wrap(
        side.net, auto_wrap_policy=policies[wrapped], param_init_fn=None if init is None else noted
    )
    yield "calls", str(calls)
    yield "values", side.whole()
    yield "next random number", torch.rand(1)
    yield "loss", side.loss(0).detach()


@pytest.mark.plain_cases("whole")
@pytest.mark.parametrize("wrapped", ["layers", "linears", "whole"])
def test_random_numbers_are_drawn_in_torchs_order(two_ranks, wrapped: str) -> None:
    two_ranks.run(case_all, wrapped=wrapped)


def case_all(rank: int, *, wrapped: str) -> None:
    for init in (None, materialise, from_above, everything):
        for with_data in (False, True) if init is not None else (False,):
            for originals in (False, True):
                arguments: dict[str, Any] = {"init": init, "wrapped": wrapped, "with_data": with_data}
                compare(meta_model, rank, originals, **arguments)


def case_data_is_kept(rank: int) -> None:
    """``reset_parameters()`` is called of what has no data alone; torch calls it of all modules."""
    with torch.device("meta"):
        net = Net()
    net.exit = nn.Linear(8, 4)
    value = net.exit.weight.detach().clone()
    side = Side("impl", rank, originals=True)
    side.net, side.model = net, side.wrap(net, device_id=CPU)
    assert torch.equal(side.whole()["exit.weight"], value)


def test_what_has_data_keeps_it(two_ranks) -> None:
    two_ranks.run(case_data_is_kept)
