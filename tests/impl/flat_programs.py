"""One program run on torch's ``FullyShardedDataParallel`` and on ours, in the same ranks, and compared.

A program yields what it sees, step by step: numbers, texts, tensors, and dictionaries of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap

from fsdpbench import impl

WIDTH = 8
CPU = torch.device("cpu")
Program = Callable[..., Iterator[tuple[str, Any]]]
TOLERANCE = 1e-5
"""Of the largest element: sums of at most 200 terms in fp32, whose order may differ."""


class Layer(nn.Module):
    """All sizes are multiples of 16 bytes: torch aligns original parameters to that, ours are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


class Net(nn.Module):
    """``count`` of its two layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.exit = nn.Linear(WIDTH, 4)
        self.count = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in list(self.layers)[: self.count]:
            x = layer(x)
        return self.exit(x)


class Side:
    """One of the two implementations, with a model wrapped by it."""

    def __init__(self, kind: str, rank: int, originals: bool, strategy: str = "FULL_SHARD") -> None:
        self.kind = kind
        self.rank = rank
        self.api: Any = torch_fsdp if kind == "torch" else impl
        self.originals = originals
        self.strategy = self.api.ShardingStrategy[strategy]
        self.net: Any = None
        self.model: Any = None

    def wrapping(self) -> Any:
        """Where the policies, ``wrap`` and ``enable_wrap`` are."""
        return torch_wrap if self.kind == "torch" else impl

    def policy(self) -> Any:
        return self.policy_of({Layer})

    def policy_of(self, classes: Any) -> Any:
        return self.wrapping().ModuleWrapPolicy(classes)

    def custom_policy(self, function: Any) -> Any:
        return self.wrapping().CustomPolicy(function)

    def function_policy(self) -> Any:
        """The policy by classes as a function."""
        wrap = self.wrapping().transformer_auto_wrap_policy
        return functools.partial(wrap, transformer_layer_cls={Layer})

    def build(self, prepare: Callable[[Any], None] = lambda net: None, **arguments: Any) -> Side:
        torch.manual_seed(0)
        self.net = Net()
        prepare(self.net)
        self.model = self.wrap(self.net, auto_wrap_policy=self.policy(), **arguments)
        return self

    def wrap(self, module: nn.Module, **arguments: Any) -> Any:
        arguments = {"use_orig_params": self.originals, "device_id": CPU, **arguments}
        return self.api.FullyShardedDataParallel(module, sharding_strategy=self.strategy, **arguments)

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        result: torch.Tensor = self.model(torch.randn(4, WIDTH, generator=generator)).square().mean()
        return result

    def named(self, module: Any = None) -> dict[str, nn.Parameter]:
        """Parameters by their plain names; a flat one by its wrapper's."""
        parts = ("_fsdp_wrapped_module.", "_flat_param")
        found = {}
        for name, parameter in (module or self.model).named_parameters():
            for part in parts:
                name = name.replace(part, "")
            found[name] = parameter
        return found

    def gradients(self) -> dict[str, Any]:
        """What ``.grad`` shows: shape of the parameter, shape and values of the gradient."""
        shown: dict[str, Any] = {}
        for name, parameter in self.named().items():
            shown[f"{name} shape"] = str(tuple(parameter.shape))
            shown[name] = None if parameter.grad is None else parameter.grad.float().clone()
        return shown

    def whole(self) -> dict[str, torch.Tensor]:
        with self.api.FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {name: parameter.detach().clone() for name, parameter in self.named().items()}


def attempt(action: Callable[[], Any]) -> str:
    """The type of what ``action`` raises, "done" if nothing."""
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):  # torch prints stacks
            action()
    except Exception as error:
        return type(error).__name__
    return "done"


def compare(program: Program, rank: int, originals: bool, strategy: str = "FULL_SHARD", **more: Any) -> None:
    """Run ``program`` on both sides; raise AssertionError naming the first thing that differs."""
    sides = [Side(kind, rank, originals, strategy) for kind in ("torch", "impl")]
    theirs, ours = (list(program(side, **more)) for side in sides)
    assert [label for label, _ in ours] == [label for label, _ in theirs]
    for (label, expected), (_, actual) in zip(theirs, ours, strict=True):
        where = f"{program.__name__} (originals={originals}, {strategy}, {more}): {label}"
        _same(actual, expected, where)


def _same(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key, value in expected.items():
            _same(actual[key], value, f"{where}, {key}")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: {actual} against {expected}"
        assert actual.shape == expected.shape, f"{where}: {actual.shape} against {expected.shape}"
        largest = expected.abs().max().item() if expected.numel() else 0.0
        worst = (actual - expected).abs().max().item() if expected.numel() else 0.0
        assert worst <= TOLERANCE * largest, f"{where}: {worst} of {largest}"
    else:
        assert actual == expected, f"{where}: {actual} against {expected}"
