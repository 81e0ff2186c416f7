"""Sections of a hardware profile, as frozen dataclasses.

Fields have the names in the TOML file, with units, so a figure has one name in file, code and report.
Ranges: `fsdpbench.sim.model.keys`; effect on costs: `kernel_costs.py` and `network.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdpbench.sim.model.keys import require

GIB = 1 << 30
MIB = 1 << 20
DTYPES = ("bf16", "fp16", "tf32", "fp32")
TILE = ("rows", "columns", "efficiency")


def require_columns(key: str, rows: Sequence[Sequence[float]], columns: Sequence[str]) -> None:
    """Raise `ProfileError` unless there are rows, each with one positive figure per column."""
    require(len(rows) > 0, key, list(rows), f"needs at least one [{', '.join(columns)}]")
    for row in rows:
        whole = len(row) == len(columns) and min(row) > 0
        require(whole, key, list(row), f"each is [{', '.join(columns)}], all positive")


@dataclass(frozen=True)
class MemoryProfile:
    """Device memory. `capacity_gib` is the total that the driver reports.

    `context_mib` is what the CUDA context and libraries use outside the caching allocator;
    `nccl_mib_per_communicator` is what each NCCL communicator uses.
    """

    capacity_gib: float
    context_mib: float
    nccl_mib_per_communicator: float
    bandwidth_gb_s: float


@dataclass(frozen=True)
class ComputeProfile:
    """Streaming multiprocessors and dense peak rates. ``peak_tflops`` has the keys bf16, fp16, tf32, fp32.

    ``clock_spread``: standard deviation over mean of the clocks of such GPUs under load
    (`fsdpbench.sim.model.profile`); ``fp32_lanes``: lanes per multiprocessor, each with two FLOPs per cycle;
    ``issue_share``: share of the schedulers' peak instruction rate that address arithmetic reaches.
    """

    sm_count: int
    peak_tflops: Mapping[str, float]
    clock_spread: float = 0.0
    fp32_lanes: int = 128
    issue_share: float = 0.75

    def __post_init__(self) -> None:
        for dtype in DTYPES:
            require(
                dtype in self.peak_tflops, "compute.peak_tflops", dict(self.peak_tflops), f"lacks {dtype}"
            )


@dataclass(frozen=True)
class GemmProfile:
    """Efficiency of dense matrix products (model: `kernel_costs.GemmCost`).

    `tiles` lists the output tiles that the library chooses from, each `[rows, columns, efficiency]`, where
    `efficiency` is the share of a multiprocessor's peak that the tile's main loop reaches.
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
        require_columns("gemm.tiles", self.tiles, TILE)


@dataclass(frozen=True)
class AttentionProfile:
    """Flash attention (model: `kernel_costs.AttentionCost`).

    Rates are for long sequences with heads of size 128; smaller heads reach the share `head_dim_64`. They
    belong to `kernel`, torch's default. The memory-efficient kernel (masks, biases) reaches `efficient_share`
    of them, the flash-attn package `flash_share`. `backward_traffic`: memory traffic of backward relative to
    a forward with as many heads of keys as of queries; 0 means 2.5 times the forward's own traffic. `doubt`:
    factor by which rates that were not measured may be wrong.
    """

    forward_tflops: float
    backward_tflops: float
    under_load: float
    head_dim_64: float
    memory_efficiency: float
    wave_quantisation: float
    floor_us: float
    efficient_share: float = 1.0
    flash_share: float = 1.0
    backward_traffic: float = 0.0
    kernel: str = "flash2"
    doubt: float = 1.0
    table: ClassVar[str] = "attention"

    def times(self, forward: float, backward: float) -> "AttentionProfile":
        """Return a copy with rates multiplied by `forward` and `backward`."""
        rates = self.forward_tflops * forward, self.backward_tflops * backward
        return dataclasses.replace(self, forward_tflops=rates[0], backward_tflops=rates[1])


@dataclass(frozen=True)
class AttentionKernel(AttentionProfile):
    """A kernel other than torch's default; `source`: origin of its figures."""

    source: str = ""


@dataclass(frozen=True)
class OlderProducts:
    """Products in libraries before CUDA 13; `weight_grad` as in `GemmProfile`."""

    weight_grad: float


@dataclass(frozen=True)
class OlderKernels:
    """Kernels from before torch 2.11 and CUDA 13, if different: flash attention 2 instead of cuDNN's
    attention, slower weight gradients. Software profiles use them if `kernels.older` is set."""

    attention: "AttentionProfile"
    gemm: OlderProducts
    table: ClassVar[str] = ""


@dataclass(frozen=True)
class BandwidthProfile:
    """Memory-bound kernels: share of the peak bandwidth by kind, and a minimum time for each kernel.

    `fused_gain`: bandwidth of Inductor's kernels relative to eager kernels.
    """

    efficiency: Mapping[str, float]
    floor_us: float
    fused_gain: float = 1.0

    def __post_init__(self) -> None:
        kinds = dict(self.efficiency)
        require("pointwise" in kinds, "bandwidth.efficiency", kinds, "lacks pointwise")


@dataclass(frozen=True)
class CpuProfile:
    """CPU times in microseconds, each for one occurrence."""

    operator_us: float
    view_us: float
    launch_us: float
    autograd_node_us: float
    module_call_us: float
    hook_us: float
    python_call_us: float
    collective_us: float
    event_us: float
    stream_us: float
    synchronize_us: float
    cuda_malloc_us: float
    cuda_malloc_us_per_gib: float
    cuda_free_us: float
    cuda_free_us_per_gib: float


@dataclass(frozen=True)
class LinkCurve:
    """Bus bandwidth of a collective by the bytes that each rank sends: ``points`` of ``[bytes, GB/s]``."""

    points: tuple[tuple[float, float], ...]
    table: ClassVar[str] = "nvlink"

    def __post_init__(self) -> None:
        require_columns("points", self.points, ("bytes", "GB/s"))
        sizes = [size for size, _ in self.points]
        require(sizes == sorted(set(sizes)), "points", sizes, "bytes must rise strictly")
        times = [size / rate for size, rate in self.points]
        # Fitted curves jump where the protocol changes, but not further.
        steady = all(later > earlier / 2 for earlier, later in itertools.pairwise(times))
        require(steady, "points", self.points, "more bytes must not take less time")


@dataclass(frozen=True)
class NvlinkProfile:
    """Collectives inside a node (model: `fsdpbench.sim.model.network`).

    Curves hold for `curve_ranks` GPUs; n GPUs reach `(n / curve_ranks) ** ranks_exponent` of them.
    `peak_gb_s` limits the traffic of a large ring inside each node. `copy_engine_gathers`: whether copy
    engines can gather in symmetric memory, in the same time and without slowing computation.
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


@dataclass(frozen=True)
class NicProtocol:
    """One of NCCL's protocols: latency of a hop over NVLink and over a NIC, and share of the bandwidth.

    `most_gb_s` limits what a rank sends. `gathers`: used by all-gathers and reduce-scatters between nodes.
    """

    nvlink_hop_us: float
    nic_hop_us: float
    bandwidth_share: float
    most_gb_s: float = 1e6
    gathers: bool = True
    table: ClassVar[str] = "nic.protocols"

    def carries(self, bandwidth: float) -> float:
        """Return the bytes/s that the protocol reaches over links of `bandwidth` bytes/s."""
        return min(bandwidth * self.bandwidth_share, self.most_gb_s * 1e9)


@dataclass(frozen=True)
class NicProfile:
    """The network between nodes. `gb_s_per_node`: sum over all NICs of a node.

    `hop_growth`: increase of a hop's time for each doubling of the nodes beyond 16; latencies up to 16 nodes
    are published.
    """

    gb_s_per_node: float
    efficiency: float
    base_us: float
    tree_share: float
    protocols: tuple[NicProtocol, ...]
    hop_growth: float = 0.0

    def __post_init__(self) -> None:
        require(len(self.protocols) > 0, "nic.protocols", self.protocols, "needs at least one")

    def hop_factor(self, nodes: int) -> float:
        """Return the time of a hop among `nodes` nodes, relative to 16 or fewer nodes."""
        return 1 + self.hop_growth * math.log2(max(1.0, nodes / 16))


@dataclass(frozen=True)
class ContentionProfile:
    """Slow-down of computation and communication kernels while the other kind also runs (1: none).

    `kernel_share`: slow-down among kernels of several streams. With 1, two concurrent kernels take twice as
    long, so concurrency gains nothing; with 0 they do not slow each other.
    """

    compute_slowdown: float
    communication_slowdown: float
    kernel_share: float = 0.0


@dataclass(frozen=True)
class HostLinkProfile:
    """The link between a GPU and its host's memory (CPU offload, host-device copies), and one rank's share of
    that memory on a full node: bandwidth (optimizer steps on the host) and size (default assumed: 1 TB for 8
    GPUs, the least among published A100 and H100 nodes)."""

    gb_s: float
    latency_us: float
    memory_gb_s: float = 38.0
    memory_gb: float = 128.0


@dataclass(frozen=True)
class StorageProfile:
    """The file system for checkpoints; it reads as fast as it writes. `gb_s`: all nodes together; 0 means 20
    GB/s per 32 nodes. Both defaults are published: write rates of the "better" storage class in NVIDIA's DGX
    SuperPOD reference architecture (DGX H100)."""

    gb_s_per_node: float = 4.0
    gb_s: float = 0.0


# `ci/fit_profiles.py` fits the `[libraries.NAME]` tables to measured operators. Libraries in `runs_use` price
# training runs. Without `runs_use`, `[gemm]`, `[attention]` and `[nvlink]` do, and the tables price only what
# those sections lack (fp8, nvfp4). Models: `library_costs` and `network` of `fsdpbench.sim.model`.
PRODUCT_TYPES = ("bf16", "fp8", "nvfp4")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def _require_rising(key: str, values: tuple[float, ...]) -> None:
    rising = len(values) > 0 and values[0] > 0 and list(values) == sorted(set(values))
    require(rising, key, values, "must be positive and rise strictly")


@dataclass(frozen=True)
class FactorGrid:
    """Factors on a model's time at the nodes of ``axes``, interpolated linearly in logarithms.

    ``factors`` lists the nodes, last axis fastest.
    """

    axes: tuple[tuple[float, ...], ...]
    factors: tuple[float, ...]
    table: ClassVar[str] = "libraries.factors"

    def __post_init__(self) -> None:
        for axis in self.axes:
            _require_rising("axes", axis)
        wanted = math.prod(map(len, self.axes))
        require(len(self.factors) == wanted, "factors", len(self.factors), f"must be {wanted} values")


@dataclass(frozen=True)
class ProductTable:
    """Matrix products of one type: the tile model of `kernel_costs` and factors on (m, n, k).

    ``operand_bytes``: size of an element of both factors, including scales. ``quantise``: how often the first
    factor is first read in 16 bits and written again (0: it is already quantised). Data that fits into
    ``cache_mib`` is read ``cache_gain`` times as fast.
    """

    peak_tflops: float
    operand_bytes: float
    tiles: tuple[tuple[float, ...], ...]
    sustained: float
    memory_efficiency: float
    prologue_k: float
    wave_quantisation: float
    floor_us: float
    quantise: float
    cache_mib: float
    cache_gain: float
    factors: FactorGrid
    table: ClassVar[str] = "libraries.products"

    def __post_init__(self) -> None:
        require_columns("tiles", self.tiles, TILE)
        require(len(self.factors.axes) == 3, "factors.axes", len(self.factors.axes), "are m, n and k")


@dataclass(frozen=True)
class AttentionTable:
    """Attention forward: the model of `fsdpbench.sim.model.kernel_costs` with factors.

    Axes of the factors: batch times heads, length, query heads per key head, and head size.
    """

    forward_tflops: float
    head_dim_64: float
    memory_efficiency: float
    wave_quantisation: float
    floor_us: float
    factors: FactorGrid
    table: ClassVar[str] = "libraries.attention"

    def __post_init__(self) -> None:
        axes = len(self.factors.axes)
        require(axes == 4, "factors.axes", axes, "are batch x heads, length, shared heads, head size")


@dataclass(frozen=True)
class RankCurve:
    """A collective among ``ranks`` GPUs of a node: ``points`` of ``[bytes of the full buffer, us]``."""

    ranks: int
    points: tuple[tuple[float, ...], ...]
    table: ClassVar[str] = "libraries.collectives"

    def __post_init__(self) -> None:
        require_columns("points", self.points, ("bytes", "us"))
        sizes, times = (tuple(point[index] for point in self.points) for index in (0, 1))
        _require_rising("points", sizes)
        require(list(times) == sorted(times), "points", times, "more bytes must not take less")


@dataclass(frozen=True)
class LibraryTables:
    """Measured operators of one library; each part may be missing.

    `switch_from`: number of ranks from which the switch reduces in collectives (0: never); `source`: origin
    of the measurements.
    """

    version: str
    source: str
    products: Mapping[str, ProductTable] = dataclasses.field(default_factory=dict)
    attention: AttentionTable | None = None
    collectives: Mapping[str, tuple[RankCurve, ...]] = dataclasses.field(default_factory=dict)
    switch_from: int = 0
    table: ClassVar[str] = "libraries"

    def __post_init__(self) -> None:
        for kind in self.products:
            require(kind in PRODUCT_TYPES, "products", kind, f"known types are {', '.join(PRODUCT_TYPES)}")
        for kind, curves in self.collectives.items():
            require(kind in COLLECTIVES, "collectives", kind, f"known are {', '.join(COLLECTIVES)}")
            require(len(curves) > 0, f"collectives.{kind}", curves, "needs at least one curve")
            _require_rising(f"collectives.{kind}.ranks", tuple(float(curve.ranks) for curve in curves))
        require(
            bool(self.source), "source", self.source, "must not be empty: say where the figures come from"
        )
