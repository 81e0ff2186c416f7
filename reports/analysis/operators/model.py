"""Rows of the tables of what ran; times in integer nanoseconds, turned into seconds in `to_dict`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdpbench.reports.analysis.device.time_units import seconds

MOST_ROWS = 200
"""Rows of each table in the JSON; the rest is summed up."""


@dataclass(frozen=True)
class Rate:
    """Work of known size. time: ns that it took.  flops, bytes: in all, None where unknown.  least: ns that
    it would take at the chip's peak, None where no peak is known."""

    time: int = 0
    flops: int | None = None
    bytes: int | None = None
    least: float | None = None

    def __add__(self, other: Rate) -> Rate:
        """Of both; what one of them knows alone is its own."""
        return Rate(
            self.time + other.time,
            _sum(self.flops, other.flops),
            _sum(self.bytes, other.bytes),
            _sum(self.least, other.least),
        )

    def to_dict(self) -> dict[str, Any]:
        known = self.time > 0
        return {
            "tflops": self.flops / self.time / 1e3 if known and self.flops else None,
            "bytes_per_s": self.bytes / seconds(self.time) if known and self.bytes else None,
            "roof_share": self.least / self.time if known and self.least else None,
        }


def _sum(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other


@dataclass(frozen=True)
class KernelTotal:
    """Kernels, copies and collectives of one name (operators on a CPU trace) within the steps.

    time: summed durations; of operators without those inside them.  share: of all kernels' time together.
    rate: of those whose work is known.
    """

    name: str
    family: str
    count: int
    time: int
    share: float
    rate: Rate = field(default_factory=Rate)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": self.family,
            "count": self.count,
            "time_s": seconds(self.time),
            "mean_s": seconds(self.time) / self.count,
            "share": self.share,
            **self.rate.to_dict(),
        }


@dataclass(frozen=True)
class OperatorTotal:
    """Calls of one operator with the same shapes. time: of the kernels that they launched.  flops, bytes: of
    one call, least bytes.  bound: what the peak is made of for it, `compute` or `memory`."""

    name: str
    shapes: str
    dtype: str
    count: int
    time: int
    share: float
    flops: int | None
    bytes: int | None
    bound: str | None
    rate: Rate

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.flops and self.bytes else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shapes": self.shapes,
            "dtype": self.dtype,
            "count": self.count,
            "time_s": seconds(self.time),
            "share": self.share,
            "flops": self.flops,
            "bytes": self.bytes,
            "flops_per_byte": self.intensity,
            "bound": self.bound,
            **self.rate.to_dict(),
        }


@dataclass(frozen=True)
class ModuleTotal:
    """Modules of one class. calls: of their forward.  own: time of the kernels launched in them and in no
    module inside; time: with those inside."""

    name: str
    instances: int
    calls: int
    own: int
    time: int
    share: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.name,
            "instances": self.instances,
            "calls": self.calls,
            "own_s": seconds(self.own),
            "time_s": seconds(self.time),
            "share": self.share,
        }


@dataclass(frozen=True)
class DeviceUse:
    """One device of a trace: how long it did anything, computed, communicated, within the steps."""

    device: int
    busy: int
    computing: int
    communicating: int
    span: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "busy_s": seconds(self.busy),
            "computation_s": seconds(self.computing),
            "communication_s": seconds(self.communicating),
            "idle_s": seconds(self.span - self.busy),
        }


@dataclass(frozen=True)
class WorkTables:
    """What ran within the steps, each table by falling time. total: all kernels' durations together, ns.
    peak: of which chip; None where it is not known."""

    total: int = 0
    kernels: tuple[KernelTotal, ...] = ()
    families: tuple[KernelTotal, ...] = ()
    operators: tuple[OperatorTotal, ...] = ()
    modules: tuple[ModuleTotal, ...] = ()
    devices: tuple[DeviceUse, ...] = ()
    roof: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel_time_s": seconds(self.total),
            "roof": self.roof,
            "kernels": [each.to_dict() for each in self.kernels[:MOST_ROWS]],
            "kernels_left_out": max(0, len(self.kernels) - MOST_ROWS),
            "kernel_families": [each.to_dict() for each in self.families],
            "operators": [each.to_dict() for each in self.operators[:MOST_ROWS]],
            "operators_left_out": max(0, len(self.operators) - MOST_ROWS),
            "modules": [each.to_dict() for each in self.modules[:MOST_ROWS]],
            "devices": [each.to_dict() for each in self.devices],
        }
