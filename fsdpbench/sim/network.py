"""What a collective takes: NVLink inside a node, NICs between nodes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from fsdpbench.sim.hardware import HardwareProfile, LinkCurve

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "barrier")


class Network:
    """Collective durations for ``world_size`` ranks, ``gpus_per_node`` of them a node, in order of rank."""

    def __init__(self, profile: HardwareProfile, world_size: int, gpus_per_node: int) -> None:
        if world_size < 1 or gpus_per_node < 1:
            raise ValueError(f"world size {world_size}, {gpus_per_node} GPUs a node: both must be at least 1")
        self.profile = profile
        self.world_size = world_size
        self.gpus_per_node = gpus_per_node
        self._cache: dict[tuple[str, int, tuple[int, int]], int] = {}

    def collective_ns(self, kind: str, nbytes: int, ranks: Sequence[int]) -> int:
        """Duration of one collective among ``ranks``.

        ``nbytes`` is the full buffer: gathered for all_gather, to be reduced for reduce_scatter and
        all_reduce, what one rank sends in all for all_to_all. Raises ValueError for an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"collective {kind!r}: known are {', '.join(KINDS)}")
        size, nodes = self._shape(ranks)
        key = (kind, nbytes, (size, nodes))
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = round(self._seconds(kind, nbytes, size, nodes) * 1e9)
        return found

    def _shape(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Number of ranks and of nodes they are on; a range is not walked through."""
        if isinstance(ranks, range):
            size = len(ranks)
            per_node = self.gpus_per_node
            if ranks.step >= per_node:
                return size, size
            return size, ranks[-1] // per_node - ranks[0] // per_node + 1
        return len(ranks), len({rank // self.gpus_per_node for rank in ranks})

    def _seconds(self, kind: str, nbytes: int, size: int, nodes: int) -> float:
        nvlink, nic = self.profile.nvlink, self.profile.nic
        latency = (nvlink.base_us + nvlink.per_doubling_us * math.log2(max(size, 1))) * 1e-6
        if kind == "barrier" or size == 1 or nbytes == 0:
            return latency if size > 1 else 2e-6
        wire = nbytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)
        curve = {"reduce_scatter": nvlink.reduce_scatter, "all_reduce": nvlink.all_reduce}.get(
            kind, nvlink.all_gather
        )
        inside = latency + wire / (_interpolate(curve, wire) * 1e9)
        if nodes == 1:
            return inside
        rails = min(size // nodes, self.gpus_per_node)
        bandwidth = nic.gb_s_per_node * 1e9 * nic.efficiency * rails / self.gpus_per_node
        between = nic.base_us * 1e-6 + (nodes - 1) * nic.hop_us * 1e-6 + wire / bandwidth
        return max(inside, between)


def _interpolate(curve: LinkCurve, size: float) -> float:
    """GB/s at ``size`` bytes on the line through the points in log-log space, flat beyond its ends."""
    points = curve.points
    index = bisect.bisect_left(points, (size, 0.0))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (low, slow), (high, fast) = points[index - 1], points[index]
    share = math.log(size / low) / math.log(high / low)
    return slow * (fast / slow) ** share
