"""Peaks of links and chips, the reference for achieved rates.

NVLink limits a ring inside a node; the NICs of a node limit a ring through several nodes, which uses one rail
for each GPU that takes part:

    ranks 0..7 on one node        inside_node
    ranks 0,8,16 on three nodes   one rail: between_nodes / gpus_per_node
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.reports.analysis.naming import PATTERNS
from fsdpbench.reports.readers import Trace

ANY_DEVICE = ""
"""Key that replaces a device's name: these links, or this chip, whatever the trace says."""


@dataclass(frozen=True)
class Links:
    """The links of a cluster's nodes, bytes per second of bus bandwidth; `between_nodes`: all NICs of a node.

    name: the hardware profile that defines them.
    """

    name: str
    gpus_per_node: int
    inside_node: float
    between_nodes: float

    def roof(self, ranks: tuple[int, ...] | None, size: int | None) -> float | None:
        """Return the peak (bytes/s) of a collective among these ranks, or of `size` adjacent ranks."""
        count = (size or 0) if ranks is None else len(ranks)
        if count < 2:
            return None
        if ranks is None:
            nodes = math.ceil(count / self.gpus_per_node)
        else:
            nodes = len({rank // self.gpus_per_node for rank in ranks})
        if nodes == 1:
            return self.inside_node
        rails = min(math.ceil(count / nodes), self.gpus_per_node)
        through_nics = self.between_nodes * rails / self.gpus_per_node
        return min(through_nics, self.inside_node) if rails > 1 else through_nics


def links_of(trace: Trace, known: Mapping[str, Links]) -> Links | None:
    """Return the links for any device, else those in the trace's label, else those `known` by device name."""
    if ANY_DEVICE in known:
        return known[ANY_DEVICE]
    hardware = (trace.simulated or {}).get("hardware")
    if isinstance(hardware, Mapping) and isinstance(hardware.get("links"), Mapping):
        return _read(str(hardware.get("name") or "its hardware"), hardware["links"])
    names = [device.get("name") for device in trace.devices]
    return next((known[name] for name in names if isinstance(name, str) and name in known), None)


def _read(name: str, links: Mapping[str, Any]) -> Links | None:
    try:
        found = Links(
            name,
            int(links["gpus_per_node"]),
            float(links["inside_node_bytes_per_s"]),
            float(links["between_nodes_bytes_per_s"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return found if min(found.gpus_per_node, found.inside_node, found.between_nodes) > 0 else None


@dataclass(frozen=True)
class Chip:
    """Peak rates of a chip. name: the hardware profile that defines them.  peak_flops: dense FLOP/s by
    compute type (bf16, fp16, tf32, fp32, ...).  memory_bandwidth: bytes per second."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float

    def roof(self, flops: float | None, size: float | None, kind: str) -> tuple[float | None, str | None]:
        """Return the ns that these FLOPs of type `kind` and `size` bytes of memory traffic take at the peak,
        and which of the two is the limit; None if unknown."""
        peak = self.peak_flops.get(kind)
        if (flops is not None and peak is None) or not (flops or size):
            return None, None
        computing, moving = (flops or 0) / (peak or 1), (size or 0) / self.memory_bandwidth
        return max(computing, moving) * 1e9, "compute" if computing >= moving else "memory"


def chip_of(trace: Trace, known: Mapping[str, Chip]) -> Chip | None:
    """Return the chip known for any device, else the one that the trace's own label describes, else the one
    known by the label's or a device's name."""
    if ANY_DEVICE in known:
        return known[ANY_DEVICE]
    hardware = (trace.simulated or {}).get("hardware")
    label = hardware if isinstance(hardware, Mapping) else {}
    names = [label.get("name"), *(device.get("name") for device in trace.devices)]
    by_name = (known[name] for name in names if isinstance(name, str) and name in known)
    return described(label) or next(by_name, None)


def described(hardware: Mapping[str, Any]) -> Chip | None:
    """Return the chip with the peaks in a description of hardware; None if it has none."""
    try:
        peaks = {str(kind): float(peak) for kind, peak in hardware["peak_flops"].items()}
        found = Chip(str(hardware["name"])[:200], peaks, float(hardware["memory_bytes_per_s"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return found if all(0 < rate < 1e30 for rate in (*peaks.values(), found.memory_bandwidth)) else None


def compute_type(input_type: str, kernel: str) -> str | None:
    """Return the type in which a product is computed, from its input type and its kernel's name."""
    found = PATTERNS["compute"].get(input_type.lower().removeprefix("c10::"))
    if found == "fp32" and ("tf32" in kernel.lower() or "s1688" in kernel):
        return "tf32"
    return found
