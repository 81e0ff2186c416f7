"""Durations of collectives: NVLink inside a node, NICs between nodes.

Inside a node the time is ``latency + bytes on the wire / bandwidth``. The bandwidth is read off a curve of a
few points (log-log), fitted to measurements on 8 GPUs; fewer GPUs reach slightly less. A profile may have one
curve per number of ranks instead.

Between nodes NCCL uses a ring through all nodes:

    node 0             node 1             node 2
    g0 > g1 > .. g7 ===> g0 > g1 > .. g7 ===> g0 > ..      > NVLink hop, === NIC hop
    \\______________________________________________________________________________/

Each step of the ring costs one hop's latency, so latency grows with the number of ranks. Bytes pass through
the NICs, with one rail for each participating GPU of a node. NCCL chooses among three protocols; those with
lower latency have less bandwidth (LL: half of each word is a flag, at most 20 GB/s; LL128: an eighth of each
line), and for all-reduce a tree of nodes, whose latency grows with their logarithm. As in NCCL's tuner, the
fastest wins, except that all-gathers and reduce-scatters between nodes never use LL128: published scaling
losses from 128 to 2,048 GPUs match a ring with the latency of Simple.
"""

import bisect
import math
from collections.abc import Sequence

from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.sections import LibraryTables, NicProtocol, RankCurve

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv", "barrier")
_GATHERS = ("all_gather", "reduce_scatter")
# Inputs of unequal sizes are sent as one broadcast per rank: 20.05 against 17.92 ms in Fig 2a of 2304.11277.
_UNEVEN = 1.12
# Bytes per GPU (8 per node) in flight before the first byte returns. Between two nodes, a buffer leaves each
# once, not twice, except these bytes. From all-reduces of 64 MiB to 16 GiB: 73 MB for 16 H100 (3200 Gb/s a
# node, 209 to 487 GB/s of bus bandwidth), 48 MB for 16 A100 (400 Gb/s, 48 to 77 GB/s, above its NICs' rate).
_FILLS_TWO_NODES = 60e6 / 8
# A collective of one rank is at most a copy.
_ALONE_S = 3e-6


class Network:
    """Durations of collectives among `world_size` ranks, placed on nodes of `gpus_per_node` in order of rank.

    If a node has fewer ranks than GPUs, each rank still has one rail of the node's NICs.
    """

    def __init__(self, profile: HardwareProfile, world_size: int, gpus_per_node: int) -> None:
        if world_size < 1 or gpus_per_node < 1:
            raise ValueError(f"world size {world_size}, {gpus_per_node} GPUs a node: both must be at least 1")
        self.profile = profile
        self.world_size = world_size
        self.gpus_per_node = gpus_per_node
        self._cache: dict[tuple[str, int, int, int, bool], int] = {}
        self._fullest = profile.nvlink.all_gather.points[-1][1] * 1e9

    def collective_ns(self, kind: str, nbytes: int, ranks: Sequence[int], *, uneven: bool = False) -> int:
        """Return the duration of one collective among `ranks`, in ns.

        `nbytes` is the full buffer: the gathered one for all_gather, the one to reduce for reduce_scatter and
        all_reduce; for all_to_all the larger of what one rank sends and receives; for send_recv what one
        neighbour gets. `uneven`: the ranks' shares differ in size. Raises `ValueError` for an unknown `kind`.
        """
        if kind not in KINDS:
            raise ValueError(f"collective {kind!r}: known are {', '.join(KINDS)}")
        size, nodes = self._shape(ranks)
        key = (kind, nbytes, size, nodes, uneven)
        found = self._cache.get(key)
        if found is None:
            seconds = self._seconds(kind, nbytes, size, nodes) * (_UNEVEN if uneven and size > 1 else 1.0)
            found = self._cache[key] = round(seconds * 1e9)
        return found

    def traffic_permille(self, kind: str, nbytes: int, ranks: Sequence[int], *, uneven: bool = False) -> int:
        """Return the bandwidth per rank, in thousandths of that of a large all-gather inside a node.

        A collective of `nbytes` takes about that share of multiprocessors and memory bandwidth (an estimate):
        NCCL opens as many channels as the slower of NVLink and NICs can feed.
        """
        size, _ = self._shape(ranks)
        seconds = self.collective_ns(kind, nbytes, ranks, uneven=uneven) * 1e-9
        if size == 1 or not seconds:
            return 0
        share = self._wire(kind, nbytes, size) / seconds / self._fullest
        return min(1000, round(1000 * share))

    def nodes_of(self, ranks: Sequence[int]) -> int:
        """Return the number of nodes that contain `ranks`."""
        return self._shape(ranks)[1]

    def _shape(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of ranks and of their nodes; does not iterate over a range."""
        size, per_node = len(ranks), self.gpus_per_node
        if size == 0:
            raise ValueError("a collective needs at least one rank")
        if isinstance(ranks, range):
            step = abs(ranks.step)
            if step >= per_node:
                return size, size
            return size, abs(ranks[-1] // per_node - ranks[0] // per_node) + 1
        return size, len({rank // per_node for rank in ranks})

    def _seconds(self, kind: str, nbytes: int, size: int, nodes: int) -> float:
        if size == 1:
            return _ALONE_S + 2 * nbytes / self.profile.memory_bandwidth
        passes, wire = _passes(kind), self._wire(kind, nbytes, size)
        if nodes == 1:
            return self._by_library(kind, nbytes, size) or self._inside(kind, wire, size, passes)
        if kind == "send_recv":  # the slowest hop is between nodes, on one GPU's share of the NICs
            nic, bandwidth = self.profile.nic, self._node_bandwidth(1, 1)
            hops = (each.nic_hop_us * 1e-6 + wire / each.carries(bandwidth) for each in nic.protocols)
            return nic.base_us * 1e-6 + min(hops)
        ring = self._ring(kind, wire, size, nodes, passes)
        if kind in ("all_reduce", "barrier"):
            return min(ring, self._tree(nbytes, size, nodes))
        return ring

    @staticmethod
    def _wire(kind: str, nbytes: int, size: int) -> float:
        """Return the number of bytes that each rank sends."""
        return nbytes * _passes(kind) * (1.0 if kind in ("broadcast", "send_recv") else (size - 1) / size)

    def _by_library(self, kind: str, nbytes: int, size: int) -> float | None:
        """Return seconds inside a node from curves of the libraries in `runs_use`, if they have any."""
        tables = (self.profile.libraries[name] for name in self.profile.runs_use)
        return next(filter(None, (curve_seconds(table, kind, nbytes, size) for table in tables)), None)

    def _inside(self, kind: str, wire: float, size: int, passes: int) -> float:
        """Return seconds inside a node."""
        nvlink = self.profile.nvlink
        latency = (nvlink.base_us + nvlink.per_rank_us * passes * (size - 1)) * 1e-6
        curve = {"reduce_scatter": nvlink.reduce_scatter, "all_reduce": nvlink.all_reduce}.get(
            kind, nvlink.all_gather
        )
        bandwidth = value_on(curve.points, wire) * (size / nvlink.curve_ranks) ** nvlink.ranks_exponent
        return latency + wire / (bandwidth * 1e9)

    def _ring(self, kind: str, wire: float, size: int, nodes: int, passes: int) -> float:
        """Return seconds of a ring through all ranks, with the fastest protocol for the size."""
        nic = self.profile.nic
        bandwidth = self._node_bandwidth(size, nodes)
        steps_inside, steps_between = (size - nodes) * passes, float(nodes * passes)
        if kind == "all_to_all":
            # All-to-all uses no ring; traffic between nodes shares the NICs.
            steps_inside, steps_between = 1, 1
            wire = max(wire * (size - size / nodes) / (size - 1), wire / 8)
        steps_between *= nic.hop_factor(nodes)
        return nic.base_us * 1e-6 + min(
            (steps_inside * protocol.nvlink_hop_us + steps_between * protocol.nic_hop_us) * 1e-6
            + wire / protocol.carries(bandwidth)
            for protocol in nic.protocols
            if protocol.gathers or kind not in _GATHERS
        )

    def _tree(self, nbytes: int, size: int, nodes: int) -> float:
        """Return seconds up and down a binary tree of nodes, with a chain of ranks inside each node."""
        nic = self.profile.nic
        bandwidth = self._node_bandwidth(size, nodes) * nic.tree_share
        depth = math.ceil(math.log2(nodes)) * nic.hop_factor(nodes)
        inside = size // nodes - 1
        carried = self._carried(nbytes, inside + 1) if nodes == 2 else 2.0 * nbytes
        between = min(_tree_time(protocol, depth, inside, carried, bandwidth) for protocol in nic.protocols)
        least = 0.0
        if nodes == 2 and inside > 0:
            # Links inside a node also carry all the bytes, in both directions.
            ranks = inside + 1
            least = self._inside("all_reduce", 2 * carried * (ranks - 1) / ranks, ranks, 2)
        return max(nic.base_us * 1e-6 + between, least)

    def _carried(self, nbytes: int, rails: int) -> float:
        """Return the bytes that leave each of two nodes, which is root of one tree and leaf of the other."""
        return nbytes + min(float(nbytes), _FILLS_TWO_NODES * min(rails, self.gpus_per_node))

    def _node_bandwidth(self, size: int, nodes: int) -> float:
        """Return bytes/s that leave a node over its NIC rails in use, at most NVLink's bandwidth to them."""
        nic = self.profile.nic
        rails = min(math.ceil(size / nodes), self.gpus_per_node)
        share = min(1.0, rails / self.profile.gpus_per_node)
        bandwidth = nic.gb_s_per_node * nic.efficiency * share
        if rails > 1:
            bandwidth = min(bandwidth, self.profile.nvlink.peak_gb_s)
        return bandwidth * 1e9


def _passes(kind: str) -> int:
    """Return how often the bytes pass around a ring."""
    return 2 if kind in ("all_reduce", "barrier") else 1


def _tree_time(protocol: NicProtocol, depth: float, inside: int, carried: float, bandwidth: float) -> float:
    """Return seconds over a tree. `carried`: the bytes that leave a node."""
    latency = 2 * (depth * protocol.nic_hop_us + inside * protocol.nvlink_hop_us) * 1e-6
    return latency + carried / protocol.carries(bandwidth)


def value_on(points: Sequence[tuple[float, ...]], size: float) -> float:
    """Return the value at `size` bytes, interpolated in log-log space and constant beyond the ends."""
    index = bisect.bisect_left(points, (size, 0.0))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (low, first), (high, second) = points[index - 1], points[index]
    share = math.log(size / low) / math.log(high / low)
    return float(first * (second / first) ** share)


# A collective without a curve of its own uses the curve of a collective that sends as many bytes.
_LIKE = {"broadcast": "all_gather", "barrier": "all_reduce"}


def curve_seconds(tables: LibraryTables, kind: str, nbytes: int, size: int) -> float | None:
    """Return seconds among `size` ranks of one node, or None if the library has no curve for `kind`.

    Each curve is interpolated in the logarithms of bytes and microseconds. Below the first point the latency
    is constant; beyond the last, time is proportional to bytes. Between measured numbers of ranks, times are
    interpolated in logarithms too, except across `switch_from` ranks, where the switch begins to reduce:
    there the nearest curve on the same side applies, scaled to the bytes that its ranks send.
    """
    curves = tables.collectives.get(_LIKE.get(kind, kind))
    if not curves:
        return None
    ranks = [curve.ranks for curve in curves]
    above = bisect.bisect_left(ranks, size)
    if above < len(curves) and ranks[above] == size:
        return time_on(curves[above], nbytes)
    if above in (0, len(curves)):
        return _scaled(curves[min(above, len(curves) - 1)], nbytes, size)
    low, high = curves[above - 1], curves[above]
    if low.ranks < tables.switch_from <= high.ranks:
        return _scaled(high if size >= tables.switch_from else low, nbytes, size)
    share = math.log(size / low.ranks) / math.log(high.ranks / low.ranks)
    return math.exp((1 - share) * math.log(time_on(low, nbytes)) + share * math.log(time_on(high, nbytes)))


def _scaled(curve: RankCurve, nbytes: int, size: int) -> float:
    """Return seconds for `size` ranks from another number's curve, at the same bytes sent per rank."""
    sent = (size - 1) / size / ((curve.ranks - 1) / curve.ranks)
    return time_on(curve, nbytes * sent)


def time_on(curve: RankCurve, nbytes: float) -> float:
    """Return seconds for a full buffer of `nbytes` among the curve's own number of ranks."""
    largest, us = curve.points[-1]
    return (us * nbytes / largest if nbytes > largest else value_on(curve.points, nbytes)) * 1e-6
