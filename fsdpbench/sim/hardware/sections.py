"""The sections of a hardware profile: frozen dataclasses that check their own figures.

Fields carry the TOML file's names, units included, so that a figure reads the same in the file, in the code
and in a report. What the figures mean for a cost stands with the models in `fsdpbench.sim.costs` and
`fsdpbench.sim.hardware.network`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from fsdpbench.errors import UsageError

GIB = 1 << 30
MIB = 1 << 20
DTYPES = ("bf16", "fp16", "tf32", "fp32")


class ProfileError(UsageError):
    """A hardware or software profile that is unknown, unreadable or inconsistent; the message names file and
    key."""


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ProfileError(f"{key} = {value!r}: {rule}")


def _require_not_negative(owner: object, section: str, *keys: str) -> None:
    for key in keys:
        value = getattr(owner, key)
        _require(value >= 0, f"{section}.{key}", value, "must not be negative")


def _require_share(owner: object, section: str, key: str) -> None:
    value = getattr(owner, key)
    _require(0 < value <= 1, f"{section}.{key}", value, "is a share in (0, 1]")


def _require_positive(owner: object, section: str, *keys: str) -> None:
    for key in keys:
        value = getattr(owner, key)
        _require(value > 0, f"{section}.{key}", value, "must be positive")


@dataclass(frozen=True)
class MemoryProfile:
    """Device memory. ``capacity_gib`` is what the driver reports as total memory.

    ``context_mib`` is what the CUDA context and libraries hold outside the caching allocator,
    ``nccl_mib_per_communicator`` what each NCCL communicator adds to it.
    """

    capacity_gib: float
    context_mib: float
    nccl_mib_per_communicator: float
    bandwidth_gb_s: float

    def __post_init__(self) -> None:
        _require_positive(self, "memory", "capacity_gib", "bandwidth_gb_s")
        _require(self.context_mib >= 0, "memory.context_mib", self.context_mib, "must not be negative")
        _require(
            self.context_mib * MIB < self.capacity_gib * GIB,
            "memory.context_mib",
            self.context_mib,
            "must be smaller than memory.capacity_gib",
        )


@dataclass(frozen=True)
class ComputeProfile:
    """Streaming multiprocessors and dense peak rates; ``peak_tflops`` has the keys bf16, fp16, tf32, fp32.

    ``clock_spread``: standard deviation of the clocks that GPUs of this kind hold under load, as a share
    (`fsdpbench.sim.timing.slowest_rank`); ``fp32_lanes``: those of a multiprocessor, each two FLOPs a cycle;
    ``issue_share``: of the instructions that its schedulers could issue, what address arithmetic reaches.
    """

    sm_count: int
    peak_tflops: Mapping[str, float]
    clock_spread: float = 0.0
    fp32_lanes: int = 128
    issue_share: float = 0.75

    def __post_init__(self) -> None:
        _require(
            0 <= self.clock_spread <= 0.1, "compute.clock_spread", self.clock_spread, "is a share up to 0.1"
        )
        _require_positive(self, "compute", "sm_count", "fp32_lanes")
        _require_share(self, "compute", "issue_share")
        for dtype in DTYPES:
            _require(
                dtype in self.peak_tflops, "compute.peak_tflops", dict(self.peak_tflops), f"lacks {dtype}"
            )
        for dtype, peak in self.peak_tflops.items():
            _require(
                dtype in DTYPES, f"compute.peak_tflops.{dtype}", peak, f"known types are {', '.join(DTYPES)}"
            )
            _require(peak > 0, f"compute.peak_tflops.{dtype}", peak, "must be positive")


@dataclass(frozen=True)
class GemmProfile:
    """Efficiency of dense matrix products; the model is described in `fsdpbench.sim.costs.gemm`.

    ``tiles`` lists the output tiles the library chooses from, each ``[rows, columns, efficiency]`` where the
    efficiency is the share of one multiprocessor's peak that a tile of this size reaches in its main loop.
    """

    tiles: tuple[tuple[float, float, float], ...]
    sustained: float
    under_load: float
    weight_grad: float
    memory_efficiency: float
    prologue_k: float
    wave_quantisation: float
    floor_us: float

    def __post_init__(self) -> None:
        _require(len(self.tiles) > 0, "gemm.tiles", self.tiles, "needs at least one tile")
        for tile in self.tiles:
            _require(
                len(tile) == 3 and min(tile) > 0,
                "gemm.tiles",
                tile,
                "each is [rows, columns, efficiency], all positive",
            )
        for key in ("sustained", "under_load", "weight_grad", "memory_efficiency"):
            _require_share(self, "gemm", key)
        _require_not_negative(self, "gemm", "prologue_k", "floor_us", "wave_quantisation")


@dataclass(frozen=True)
class AttentionProfile:
    """Flash attention; the model is described in `fsdpbench.sim.costs.attention`.

    Rates are those of long sequences with heads of 128, ``head_dim_64`` the share that smaller heads reach.
    """

    forward_tflops: float
    backward_tflops: float
    under_load: float
    head_dim_64: float
    memory_efficiency: float
    wave_quantisation: float
    floor_us: float

    def __post_init__(self) -> None:
        _require_positive(self, "attention", "forward_tflops", "backward_tflops")
        for key in ("under_load", "head_dim_64", "memory_efficiency"):
            _require_share(self, "attention", key)
        _require_not_negative(self, "attention", "floor_us", "wave_quantisation")


@dataclass(frozen=True)
class BandwidthProfile:
    """Memory-bound kernels: share of the peak bandwidth by kind, above a floor a kernel.

    ``fused_gain``: how many times as much kernels reach that Inductor generates.
    """

    efficiency: Mapping[str, float]
    floor_us: float
    fused_gain: float = 1.0

    def __post_init__(self) -> None:
        _require(
            "pointwise" in self.efficiency, "bandwidth.efficiency", dict(self.efficiency), "lacks pointwise"
        )
        for kind, share in self.efficiency.items():
            _require(0 < share <= 1, f"bandwidth.efficiency.{kind}", share, "is a share in (0, 1]")
        _require_not_negative(self, "bandwidth", "floor_us")
        _require_positive(self, "bandwidth", "fused_gain")


@dataclass(frozen=True)
class CpuProfile:
    """Host costs in microseconds of one occurrence each."""

    operator_us: float
    view_us: float
    launch_us: float
    autograd_node_us: float
    module_call_us: float
    hook_us: float
    collective_us: float
    event_us: float
    stream_us: float
    synchronize_us: float
    cuda_malloc_us: float
    cuda_malloc_us_per_gib: float
    cuda_free_us: float
    cuda_free_us_per_gib: float

    def __post_init__(self) -> None:
        _require_not_negative(self, "cpu", *(field.name for field in dataclasses.fields(self)))


@dataclass(frozen=True)
class LinkCurve:
    """Bus bandwidth of a collective by the bytes that one rank sends: ``points`` of ``[bytes, GB/s]``."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        _require(len(self.points) > 0, "points", self.points, "needs at least one [bytes, GB/s]")
        for point in self.points:
            _require(
                len(point) == 2 and min(point) > 0, "points", point, "each is [bytes, GB/s], both positive"
            )
        sizes = [point[0] for point in self.points]
        _require(sizes == sorted(set(sizes)), "points", sizes, "bytes must rise strictly")


@dataclass(frozen=True)
class NvlinkProfile:
    """Collectives inside a node; the model is described in `fsdpbench.sim.hardware.network`.

    Curves hold for ``curve_ranks`` GPUs; n of them reach ``(n / curve_ranks) ** ranks_exponent`` of it.
    ``peak_gb_s`` bounds what a ring through many nodes carries inside each. ``copy_engine_gathers``: whether
    copy engines can gather in symmetric memory; they take as long, and do not slow computation.
    """

    base_us: float
    per_rank_us: float
    peak_gb_s: float
    curve_ranks: int
    ranks_exponent: float
    all_gather: LinkCurve
    reduce_scatter: LinkCurve
    all_reduce: LinkCurve
    copy_engine_gathers: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "nvlink", "peak_gb_s", "curve_ranks")
        _require_not_negative(self, "nvlink", "base_us", "per_rank_us", "ranks_exponent")


@dataclass(frozen=True)
class NicProtocol:
    """One of NCCL's protocols: a hop's latency over NVLink and over a NIC, and its share of the bandwidth.

    ``most_gb_s``: what a rank sends at most, however fast the network. ``gathers``: whether all-gathers and
    reduce-scatters between nodes use it.
    """

    nvlink_hop_us: float
    nic_hop_us: float
    bandwidth_share: float
    most_gb_s: float = 1e6
    gathers: bool = True

    def __post_init__(self) -> None:
        _require_not_negative(self, "protocols", "nvlink_hop_us", "nic_hop_us")
        _require_share(self, "protocols", "bandwidth_share")
        _require_positive(self, "protocols", "most_gb_s")

    def carries(self, bandwidth: float) -> float:
        """Bytes a second of ``bandwidth``, that of the links."""
        return min(bandwidth * self.bandwidth_share, self.most_gb_s * 1e9)


@dataclass(frozen=True)
class NicProfile:
    """The network between nodes. ``gb_s_per_node`` is what all NICs of a node send at the same time."""

    gb_s_per_node: float
    efficiency: float
    base_us: float
    tree_share: float
    protocols: tuple[NicProtocol, ...]

    def __post_init__(self) -> None:
        _require_positive(self, "nic", "gb_s_per_node")
        _require_share(self, "nic", "efficiency")
        _require_share(self, "nic", "tree_share")
        _require_not_negative(self, "nic", "base_us")
        _require(len(self.protocols) > 0, "nic.protocols", self.protocols, "needs at least one")


@dataclass(frozen=True)
class ContentionProfile:
    """How much longer a kernel takes while the other kind runs beside it (1 = not at all).

    ``kernel_share``: what kernels of several streams take from each other. With 1 two that run together take
    twice as long, so that nothing is won; with 0 neither notices the other.
    """

    compute_slowdown: float
    communication_slowdown: float
    kernel_share: float = 0.0

    def __post_init__(self) -> None:
        _require(
            0 <= self.kernel_share <= 1, "contention.kernel_share", self.kernel_share, "is a share up to 1"
        )
        for key in ("compute_slowdown", "communication_slowdown"):
            _require(
                getattr(self, key) >= 1, f"contention.{key}", getattr(self, key), "is a factor of at least 1"
            )


@dataclass(frozen=True)
class HostLinkProfile:
    """The link between a GPU and its host's memory (CPU offload, copies to and from the host), and what one
    rank of a full node reaches of that memory's bandwidth (optimizer steps on the host)."""

    gb_s: float
    latency_us: float
    memory_gb_s: float = 38.0

    def __post_init__(self) -> None:
        _require_positive(self, "host_link", "gb_s", "memory_gb_s")
        _require(self.latency_us >= 0, "host_link.latency_us", self.latency_us, "must not be negative")
