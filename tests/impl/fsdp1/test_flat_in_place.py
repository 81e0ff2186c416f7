"""Modules that write in place, to their inputs or to parameters, and the order in which these are listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fsdpbench import impl

MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
CPU = torch.device("cpu")


def wrap(api: Any, module: nn.Module, originals: bool) -> Any:
    if api is None:
        return module
    return api.FullyShardedDataParallel(module, use_orig_params=originals, device_id=CPU)


class Writing(nn.Module):
    """Changes its input, in one of the ways of ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor, *, named: torch.Tensor) -> torch.Tensor:
        if self.how == "relu":
            x = torch.relu_(x)
        elif self.how == "returned":
            return x.mul_(2)
        elif self.how == "part":
            x[:1].mul_(2)
        elif self.how == "no_grad":
            with torch.no_grad():
                x.mul_(2)
        elif self.how == "twice given":
            x.mul_(2)
        elif self.how == "named":
            named.mul_(3)
        elif self.how == "used before":
            y = self.linear(x)
            x.add_(1)
            return y
        return self.linear(x) * named.sigmoid() + other


class Around(nn.Module):
    """Goes on with what the unit changed."""

    def __init__(self, how: str, api: Any, originals: bool) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.unit = wrap(api, Writing(how), originals)
        self.after = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, named = self.before(x), self.before(2 * x)
        return (self.after(self.unit(h, h, named=named)) + h + named).square().sum()


def losses(api: Any, how: str, originals: bool) -> list[float] | str:
    torch.manual_seed(0)
    model = wrap(api, Around(how, api, originals), originals)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    try:
        for _ in range(3):
            loss = model(torch.arange(8.0).view(2, 4) / 4 - 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    except RuntimeError as error:
        return str(error)[:60]
    return found


def case_inputs(rank: int, *, originals: bool) -> None:
    for how in ("relu", "returned", "part", "no_grad", "twice given", "named", "used before"):
        ours, torchs, plain = (losses(api, how, originals) for api in (impl, torch_fsdp, None))
        if how == "used before":
            assert ours == torchs == plain, how
            assert "modified by an inplace" in str(ours) or "needed for gradient" in str(ours)
            continue
        assert ours == pytest.approx(torchs, rel=1e-6), how
        assert ours == pytest.approx(plain, rel=1e-5), how


@MODES
def test_inputs_changed_in_place(two_ranks, originals: bool) -> None:
    """Inside of the unit and for its caller, in values and in gradients."""
    two_ranks.run(case_inputs, originals=originals)


class Sharing(nn.Module):
    """Changes an input that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(2)) + part.sum()


def case_shared_memory(rank: int) -> None:
    unit = wrap(impl, Sharing(), True)
    h = torch.ones(2, 4, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="shares memory with another of its inputs"):
        unit(h, h[1:])


def test_inputs_that_share_memory_are_refused(two_ranks) -> None:
    two_ranks.run(case_shared_memory)


class Renormed(nn.Module):
    """``max_norm`` writes to the embedding in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, max_norm=0.5)
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embed(tokens))


def case_parameters(rank: int, *, originals: bool) -> None:
    tokens = torch.tensor([0, 1, 2])
    for api in (impl, torch_fsdp):
        inside = nn.Sequential(wrap(api, Renormed(), originals), nn.Linear(4, 4))
        model = wrap(api, inside, originals)
        with torch.no_grad():  # is not trained, so nothing is lost
            model(tokens)
        with pytest.raises(RuntimeError) as raised:
            model(tokens).sum().backward()
        if api is impl:
            assert "embed.weight" in str(raised.value)
            assert "max_norm" in str(raised.value)


@MODES
def test_parameters_written_to_are_refused(two_ranks, originals: bool) -> None:
    two_ranks.run(case_parameters, originals=originals)


class Tied(nn.Module):
    """One weight at several places of one module, and of several modules, one of which has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.scales = nn.Module()
        self.scales.a = self.scales.b = nn.Parameter(torch.ones(3))
        self.scales.c = nn.Parameter(torch.ones(4))
        self.scales.d = self.scales.a
        self.again = self.scales
        self.other = nn.Module()
        self.other.a = self.scales.c
        self.other.own = nn.Parameter(torch.ones(2))


def case_order(rank: int, *, originals: bool) -> None:
    orders = []
    for api in (impl, torch_fsdp):
        model = wrap(api, Tied(), originals)
        cls = api.FullyShardedDataParallel
        found = []
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            with cls.state_dict_type(model, getattr(api.StateDictType, kind)):
                found.append(list(model.state_dict()))
        with cls.summon_full_params(model):
            found.append([name for name, _ in model.named_parameters()])
        orders.append(found)
    assert orders[0] == orders[1]
    assert orders[0][0].index("head.bias") < orders[0][0].index("head.weight")


@MODES
def test_tied_parameters_are_listed_in_the_same_order(two_ranks, originals: bool) -> None:
    two_ranks.run(case_order, originals=originals)
