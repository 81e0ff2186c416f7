"""The host's costs of operators, modules, hooks, events and allocations (`CpuProfile`), and the host link.

Each figure is a difference or a slope, so that the cost of the measuring loop cancels. A clock on the host
cannot separate the launch from its operator, so the launch time is the base profile's.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fsdpbench.lab.calibrate.machine import Machine
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import GIB, MIB, CpuProfile, HostLinkProfile

_BLOCKS, _OPERATORS = 10, 3
_NODES, _BACKWARD_VIEWS = 5, 5  # kernels and views in a block's backward
_SEGMENTS = (64 * MIB, 256 * MIB, GIB, 4 * GIB)
_COPIES = (MIB, 16 * MIB, 256 * MIB)
NOT_MEASURED = "launch_us"


def measure_host(machine: Machine, profile: HardwareProfile) -> CpuProfile:
    """Return host costs in microseconds, none of them negative."""
    tensor = machine.normal(16)
    view = _us(machine, lambda: tensor.view(4, 4))
    block, backward = _network(machine)
    operator = (block - view) / _OPERATORS
    node = (backward - _BACKWARD_VIEWS * view) / _NODES
    plain, hooked = nn.Identity(), nn.Identity()
    hooked.register_forward_hook(lambda *_: None)
    module = _us(machine, lambda: plain(tensor))
    malloc, free = _segments(machine)
    return dataclasses.replace(
        profile.cpu,
        operator_us=_positive(operator - profile.cpu.launch_us),
        view_us=view,
        autograd_node_us=_positive(node - operator),
        module_call_us=module,
        hook_us=_positive(_us(machine, lambda: hooked(tensor)) - module),
        python_call_us=module,  # an assumption from steps of FSDP (ci/measured/host_time.txt)
        collective_us=_collective(machine, profile),
        event_us=_event(machine),
        stream_us=_stream(machine),
        synchronize_us=_us(machine, machine.module.synchronize),
        cuda_malloc_us=malloc[0],
        cuda_malloc_us_per_gib=malloc[1],
        cuda_free_us=free[0],
        cuda_free_us_per_gib=free[1],
    )


def measure_host_link(machine: Machine, base: HostLinkProfile) -> HostLinkProfile:
    """Fit a line to copies of three sizes from the host's memory (pinned on a real GPU)."""
    seconds = []
    for size in _COPIES:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=not machine.simulated)
        there = torch.zeros(size, dtype=torch.uint8, device=machine.device)
        seconds.append(machine.device_seconds(partial(there.copy_, host, non_blocking=True)))
    constant, slope = line(_COPIES, seconds)
    return HostLinkProfile(
        gb_s=1e-9 / slope,
        latency_us=_positive(constant * 1e6),
        memory_gb=base.memory_gb,
        memory_gb_s=base.memory_gb_s,  # one rank cannot show its share of the bandwidth in a full node
    )


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return constant and slope of a line fitted by relative error."""
    matrix = np.stack([np.ones(len(x)), np.asarray(x, float)], axis=1)
    weights = 1 / np.asarray(y, float)
    solution, *_ = np.linalg.lstsq(matrix * weights[:, None], np.ones(len(x)), rcond=None)
    return float(solution[0]), float(solution[1])


def _us(machine: Machine, run: Callable[[], object]) -> float:
    return machine.host_seconds(run) * 1e6


def _positive(value: float) -> float:
    return max(0.0, value)


def _network(machine: Machine) -> tuple[float, float]:
    """Return microseconds of a block's forward and backward: linear layer, norm, product with a number."""
    leaves = [machine.normal(*shape).requires_grad_() for shape in ((16, 16), (16,), (16,), (16,)) * _BLOCKS]
    x = machine.normal(16, 16).requires_grad_()

    def forward() -> torch.Tensor:
        y = x
        for place in range(0, len(leaves), 4):
            weight, bias, scale, shift = leaves[place : place + 4]
            y = torch.layer_norm(F.linear(y, weight, bias), (16,), scale, shift) * 0.5
        return y

    y, forward_us = forward(), machine.host_seconds(forward, repeats=5) * 1e6
    gradients = partial(torch.autograd.grad, y, [x, *leaves], torch.zeros_like(y), retain_graph=True)
    return forward_us / _BLOCKS, machine.host_seconds(gradients, repeats=5) * 1e6 / _BLOCKS


def _event(machine: Machine) -> float:
    event = machine.module.Event()
    return _us(machine, event.record)


def _stream(machine: Machine) -> float:
    """Return the time of one switch; entering and leaving a stream's context are two."""
    stream = machine.module.Stream()

    def switch() -> None:
        with machine.module.stream(stream):
            pass

    return _us(machine, switch) / 2


def _collective(machine: Machine, profile: HardwareProfile) -> float:
    if not dist.is_initialized():
        return profile.cpu.collective_us
    tensor = machine.normal(16)
    return machine.host_seconds(lambda: dist.all_reduce(tensor), repeats=20) * 1e6


def _segments(machine: Machine) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (constant, per GiB) in microseconds of allocating memory from the driver, and of freeing it."""
    largest = machine.module.mem_get_info()[0] // 2
    sizes = [size for size in _SEGMENTS if size < largest]
    malloc, free = [], []
    for size in sizes:
        machine.module.empty_cache()
        held: list[torch.Tensor] = []
        malloc.append(machine.blocking_seconds(partial(_hold, held, size, machine.device)))
        held.clear()
        free.append(machine.blocking_seconds(machine.module.empty_cache))
    return _by_gib(sizes, malloc), _by_gib(sizes, free)


def _hold(held: list[torch.Tensor], size: int, device: torch.device) -> None:
    held.append(torch.empty(size, dtype=torch.uint8, device=device))


def _by_gib(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    constant, slope = line([size / GIB for size in sizes], seconds)
    return _positive(constant * 1e6), _positive(slope * 1e6)
