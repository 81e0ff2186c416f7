"""Memory-bound kernels: the share of the peak bandwidth that each kind of operator reaches.

Each kind is measured on the operators that training steps are full of, at their dtypes; their bytes are
counted as the simulator counts them. The kind's share is the median over its operators.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from fsdpbench.base.torch_internals import TorchDispatchMode, fused_adamw_
from fsdpbench.lab.calibrate.machine import Machine
from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import BandwidthProfile
from fsdpbench.sim.torch_device.prices import price

Work = Callable[[torch.device], Callable[[], object]]
_ROWS, _WIDTH = 16384, 4096
_VOCABULARY = 50304
_SWEPT = 1 << 28
_BEST_SHARE = 0.93


def measure_bandwidth(machine: Machine, profile: HardwareProfile) -> BandwidthProfile:
    """Shares by kind and the smallest kernel's time, against the peak bandwidth of ``profile``."""
    tiny = machine.normal(16)
    floor = machine.device_seconds(lambda: tiny.add_(1), repeats=50)
    efficiency = dict(profile.bandwidth.efficiency)
    for kind, works in _WORKS.items():
        shares = [_share(machine, profile, work, floor) for work in works]
        efficiency[kind] = min(1.0, statistics.median(shares))
    return dataclasses.replace(
        profile.bandwidth, efficiency=MappingProxyType(efficiency), floor_us=floor * 1e6
    )


def peak_bandwidth(machine: Machine, profile: HardwareProfile) -> float:
    """GB/s of the memory at best: the base's, unless a plain sweep through memory comes too near to it.

    No kernel reaches its data sheet's figure. One that seems to runs on other memory than the base's.
    """
    whole = machine.normal(_SWEPT)
    reached = 2 * _SWEPT / machine.device_seconds(lambda: whole.mul_(2)) / 1e9 * whole.element_size()
    if reached <= _BEST_SHARE * profile.memory.bandwidth_gb_s:
        return profile.memory.bandwidth_gb_s
    return reached / _BEST_SHARE


def _share(machine: Machine, profile: HardwareProfile, work: Work, floor: float) -> float:
    seconds = machine.device_seconds(work(machine.device))
    ideal = bytes_moved(work, profile) / profile.memory_bandwidth
    return ideal / max(seconds - floor, 1e-9)


def _tensor(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _call(
    operator: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> Work:
    """Return the work of calling `operator` with zeros of these shapes."""

    def prepare(device: torch.device) -> Callable[[], object]:
        return partial(operator, *(_tensor(device, *shape, dtype=dtype) for shape in shapes))

    return prepare


def _layer_norm_backward(device: torch.device) -> Callable[[], object]:
    x, weight = _tensor(device, _ROWS, _WIDTH), _tensor(device, _WIDTH)
    gradient = _tensor(device, _ROWS, _WIDTH)
    mean, rstd = (_tensor(device, _ROWS, 1, dtype=torch.float32) for _ in range(2))
    return lambda: torch.ops.aten.native_layer_norm_backward(
        gradient, x, (_WIDTH,), mean, rstd, weight, None, [True, True, False]
    )


def _adamw(device: torch.device) -> Callable[[], object]:
    lists = [[_tensor(device, _ROWS, _WIDTH, dtype=torch.float32)] for _ in range(4)]
    steps = [torch.ones((), device=device)]
    update: Callable[..., object] = fused_adamw_
    options = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    return lambda: update(*lists, [], steps, amsgrad=False, maximize=False, **options)


def _embedding(device: torch.device) -> Callable[[], object]:
    table = _tensor(device, _VOCABULARY, _WIDTH)
    tokens = torch.zeros(_ROWS, dtype=torch.int64, device=device)
    if device.type == "cuda":
        tokens.random_(0, _VOCABULARY)
    return lambda: F.embedding(tokens, table)


_ROW, _WIDE = (_ROWS, _WIDTH), (_ROWS, 4 * _WIDTH)
_WORKS: dict[str, tuple[Work, ...]] = {
    "pointwise": (
        _call(torch.add, _ROW, _ROW),
        _call(F.gelu, _WIDE),
        _call(torch.ops.aten.gelu_backward, _WIDE, _WIDE),
        _call(lambda x: x.mul_(0.5), _ROW, dtype=torch.float32),
    ),
    "copy": (
        _call(lambda x: x.to(torch.bfloat16), _ROW, dtype=torch.float32),
        _call(lambda x, y: torch.cat((x, y)), _ROW, _ROW),
    ),
    "memcpy": (_call(torch.clone, _ROW),),
    "reduction": (
        _call(lambda x, weight: F.layer_norm(x, (_WIDTH,), weight), _ROW, (_WIDTH,)),
        _layer_norm_backward,
        _call(lambda x: torch.log_softmax(x, -1), (_ROWS // 8, _VOCABULARY)),
    ),
    "optimizer": (_adamw,),
    "gather": (_embedding,),
}


# What the simulator's cost models see of a piece of work: the bytes that its kernels move.
# A bandwidth efficiency only means something against the bytes that the simulator will divide it by. So the
# work runs once on meta tensors, and the simulator's own price list says what it moves.


def bytes_moved(run: Callable[[torch.device], Callable[[], object]], profile: HardwareProfile) -> float:
    """Bytes that the memory-bound kernels of ``run`` move, where ``run(device)`` prepares it."""
    meter = _Meter(profile)
    work = run(torch.device("meta"))
    with meter:
        work()
    return meter.seconds * profile.memory_bandwidth


class _Meter(TorchDispatchMode):
    """Adds up what operators cost on a machine whose only cost is its memory's peak bandwidth."""

    def __init__(self, profile: HardwareProfile) -> None:
        super().__init__()
        whole = MappingProxyType(dict.fromkeys(profile.bandwidth.efficiency, 1.0))
        bandwidth = dataclasses.replace(profile.bandwidth, efficiency=whole, floor_us=0.0)
        self._costs = KernelCosts(dataclasses.replace(profile, bandwidth=bandwidth))
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seconds += price(func, args, kwargs or {}, out, self._costs).duration_ns / 1e9
        return out
