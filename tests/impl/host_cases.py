"""The model and the set-up with which host work is counted and timed: 24 units of small parameters, a fake
group.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench import impl

UNITS = 24
RANKS = 8
SYSTEMS = ("torch-fsdp2", "impl-fsdp2", "torch-flat", "impl-flat", "torch-original", "impl-original")


class ManyParameters(nn.Module):
    """One multiplication a parameter: next to no computation, so that what is left is the host's work."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.units = nn.ModuleList(ManyParameters(count) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for unit in self.units:
            x = unit(x)
        return x


@contextmanager
def fake_group() -> Iterator[None]:
    """A group of eight of which only this rank exists: collectives return at once and move nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def build(system: str, count: int, low_precision: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(count)
    if system == "plain":
        return model
    api: Any = torch_fsdp if system.startswith("torch") else impl
    dtypes = (torch.bfloat16, torch.float32)
    arguments: dict[str, Any] = {}
    if system.endswith("fsdp2"):
        arguments["mesh"] = init_device_mesh("cpu", (RANKS,))
        if low_precision:
            arguments["mp_policy"] = api.MixedPrecisionPolicy(*dtypes)
        for unit in model.units:
            api.fully_shard(unit, **arguments)
        return api.fully_shard(model, **arguments)
    if low_precision:
        arguments["mixed_precision"] = api.MixedPrecision(*dtypes)
    policy: Any = TorchModuleWrapPolicy if api is torch_fsdp else impl.ModuleWrapPolicy
    return api.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy({ManyParameters}),
        device_id=torch.device("cpu"),
        use_orig_params=system.endswith("original"),
        **arguments,
    )


def step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).sum().backward()


def forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


class Counter(TorchDispatchMode):
    """Counts operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@functools.cache
def work_of(name: str, count: int, low_precision: bool) -> tuple[int, int]:
    """Python calls and dispatched operators of one step of a model, once it is warm."""
    batch = torch.ones(4, 16)
    model = build(name, count, low_precision)
    for _ in range(3):
        step(model, batch)
        forget_gradients(model)
    calls = [0]

    def called(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[0] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(called)
    try:
        step(model, batch)
    finally:
        sys.setprofile(None)
        gc.enable()
    forget_gradients(model)
    with Counter() as counter:
        step(model, batch)
    return calls[0], counter.count


def count_work(system: str, count: int = 12, low_precision: bool = False) -> tuple[float, float]:
    """Python calls and dispatched operators a unit of one step, beyond those of the plain model."""
    plain, wrapped = work_of("plain", count, False), work_of(system, count, low_precision)
    return (wrapped[0] - plain[0]) / UNITS, (wrapped[1] - plain[1]) / UNITS
