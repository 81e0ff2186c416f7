"""Collectives between the ranks of this machine, and between machines: `NvlinkProfile`, `NicProfile`.

Needs a process group of at least two ranks. The latency is what the smallest collective takes; the curves
are the bus bandwidth above it, at the sizes that the base profile has points for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.lab.calibrate.machine import Machine
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import ContentionProfile, LinkCurve, NicProfile, NvlinkProfile

# Names since torch 2.13, which warns of the older ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_TINY = 1024
_BIG = 1 << 29


def measure_nvlink(machine: Machine, profile: HardwareProfile, group: dist.ProcessGroup) -> NvlinkProfile:
    """All collectives inside one node; ``group`` holds the ranks of this node."""
    base, ranks = profile.nvlink, group.size()
    tiny = _seconds(machine, "all_gather", _TINY * ranks, group)
    # The smallest collective is all latency: the base's parts of it keep their proportion.
    believed = base.base_us + base.per_rank_us * (ranks - 1)
    scale = tiny * 1e6 / believed if believed else 1.0
    base = dataclasses.replace(
        base, base_us=base.base_us * scale, per_rank_us=base.per_rank_us * scale, curve_ranks=ranks
    )
    return dataclasses.replace(
        base,
        all_gather=_curve(machine, base, "all_gather", group),
        reduce_scatter=_curve(machine, base, "reduce_scatter", group),
        all_reduce=_curve(machine, base, "all_reduce", group),
    )


def measure_nic(machine: Machine, profile: HardwareProfile) -> NicProfile:
    """Measure what a node sends together, by one large all-gather among all ranks of several nodes."""
    size = dist.get_world_size()
    wire = _BIG * (size - 1) / size
    bandwidth = wire / _seconds(machine, "all_gather", _BIG, None) / 1e9
    return dataclasses.replace(profile.nic, gb_s_per_node=bandwidth / profile.nic.efficiency)


def measure_contention(machine: Machine, profile: HardwareProfile) -> ContentionProfile:
    """How much longer a product takes while an all-gather runs beside it."""
    a = machine.normal(8192, 8192)
    alone = machine.device_seconds(lambda: a @ a)
    shard = torch.zeros(_BIG // dist.get_world_size(), dtype=torch.uint8, device=machine.device)
    whole = torch.zeros(shard.numel() * dist.get_world_size(), dtype=torch.uint8, device=machine.device)

    def beside() -> None:
        works = [_all_gather(whole, shard, async_op=True) for _ in range(8)]
        start, end = (machine.module.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(2):
            a @ a
        end.record()
        for work in works:
            work.wait()
        machine.module.synchronize()
        times.append(start.elapsed_time(end) / 2e3)

    times: list[float] = []
    for _ in range(5):
        beside()
    slowdown = sorted(times)[len(times) // 2] / alone
    return dataclasses.replace(profile.contention, compute_slowdown=max(1.0, slowdown))


def _curve(machine: Machine, base: NvlinkProfile, kind: str, group: dist.ProcessGroup) -> LinkCurve:
    """Bus bandwidth at the base's points, which count the bytes that one rank sends."""
    ranks = group.size()
    passes = 2 if kind == "all_reduce" else 1
    latency = (base.base_us + base.per_rank_us * passes * (ranks - 1)) * 1e-6
    points = []
    for wire, _ in getattr(base, kind).points:
        nbytes = max(ranks, int(wire * ranks / (ranks - 1) / passes) // (2 * ranks) * (2 * ranks))
        seconds = _seconds(machine, kind, nbytes, group)
        points.append((wire, wire / max(seconds - latency, seconds * 0.05) / 1e9))
    return LinkCurve(tuple(points))


def _seconds(machine: Machine, kind: str, nbytes: int, group: dist.ProcessGroup | None) -> float:
    """Device time of one collective over a full buffer of ``nbytes`` (bf16)."""
    ranks = dist.get_world_size(group)
    whole = machine.normal(nbytes // 2)
    shard = machine.normal(nbytes // 2 // ranks)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: _all_gather(whole, shard, group=group),
        "reduce_scatter": lambda: _reduce_scatter(shard, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return machine.device_seconds(calls[kind])
