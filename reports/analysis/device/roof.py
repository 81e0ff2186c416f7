"""What a link could carry at most: the peak that the achieved bus bandwidth is held against.

A ring inside a node is bound by NVLink; one through several nodes by the NICs of a node, of which it uses a
rail for each GPU that takes part:

    ranks 0..7 on one node        inside_node
    ranks 0,8,16 on three nodes   one rail: between_nodes / gpus_per_node
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.reports.trace import Trace

ANY_DEVICE = ""
"""Instead of a device's name: these links, whatever the trace says."""


@dataclass(frozen=True)
class Links:
    """The links of a cluster's nodes, bytes per second of bus bandwidth; `between_nodes`: all NICs of a node.

    name: of the hardware profile that says so.
    """

    name: str
    gpus_per_node: int
    inside_node: float
    between_nodes: float

    def roof(self, ranks: tuple[int, ...] | None, size: int | None) -> float | None:
        """Of a collective among these ranks; of `size` ranks side by side where they are not known."""
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
    """The links known for any device, else those that a trace's own label names, else those `known` for its
    device's name."""
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
