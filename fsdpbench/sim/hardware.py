"""Hardware profiles: everything the simulator knows about a machine, read from one TOML file.

A profile is a tree of frozen dataclasses whose fields carry the TOML file's own names, units included
(``bandwidth_gb_s``, ``launch_us``), so that a figure reads the same in the file, in the code and in a
report. Derived values in the simulator's units (bytes, FLOP/s) are properties of `HardwareProfile`.

Every file names its sources; figures that nobody measured are listed in its ``estimated``.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
DTYPES = ("bf16", "fp16", "tf32", "fp32")
_PROFILE_FOLDER = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A hardware profile that is unknown, unreadable or inconsistent; the message names file and key."""


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ProfileError(f"{key} = {value!r}: {rule}")


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
    """Streaming multiprocessors and dense peak rates; ``peak_tflops`` has the keys bf16, fp16, tf32, fp32."""

    sm_count: int
    peak_tflops: Mapping[str, float]

    def __post_init__(self) -> None:
        _require_positive(self, "compute", "sm_count")
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
    weight_grad: float
    memory_efficiency: float
    l2_reuse_rows: float
    prologue_k: float
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
        for key in ("sustained", "weight_grad", "memory_efficiency"):
            _require(0 < getattr(self, key) <= 1, f"gemm.{key}", getattr(self, key), "is a share in (0, 1]")
        _require(self.prologue_k >= 0, "gemm.prologue_k", self.prologue_k, "must not be negative")
        _require(self.floor_us >= 0, "gemm.floor_us", self.floor_us, "must not be negative")


@dataclass(frozen=True)
class AttentionProfile:
    """Flash attention: rate on long sequences, and the lengths at which half of it is lost."""

    forward_tflops: float
    backward_tflops: float
    half_length: float
    half_heads: float
    head_dim_128: float
    floor_us: float

    def __post_init__(self) -> None:
        _require_positive(self, "attention", "forward_tflops", "backward_tflops", "head_dim_128")
        for key in ("half_length", "half_heads", "floor_us"):
            _require(getattr(self, key) >= 0, f"attention.{key}", getattr(self, key), "must not be negative")


@dataclass(frozen=True)
class BandwidthProfile:
    """Memory-bound kernels: share of the peak bandwidth by kind, and the bytes that reach half of it."""

    efficiency: Mapping[str, float]
    half_bytes: float
    floor_us: float

    def __post_init__(self) -> None:
        _require(
            "pointwise" in self.efficiency, "bandwidth.efficiency", dict(self.efficiency), "lacks pointwise"
        )
        for kind, share in self.efficiency.items():
            _require(0 < share <= 1, f"bandwidth.efficiency.{kind}", share, "is a share in (0, 1]")
        _require(self.half_bytes >= 0, "bandwidth.half_bytes", self.half_bytes, "must not be negative")
        _require(self.floor_us >= 0, "bandwidth.floor_us", self.floor_us, "must not be negative")


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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _require(value >= 0, f"cpu.{field.name}", value, "must not be negative")


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
    """Collectives inside a node: latency ``base_us + log2(ranks) * per_doubling_us``, bandwidth by curves."""

    base_us: float
    per_doubling_us: float
    all_gather: LinkCurve
    reduce_scatter: LinkCurve
    all_reduce: LinkCurve

    def __post_init__(self) -> None:
        for key in ("base_us", "per_doubling_us"):
            _require(getattr(self, key) >= 0, f"nvlink.{key}", getattr(self, key), "must not be negative")


@dataclass(frozen=True)
class NicProfile:
    """The network between nodes. ``gb_s_per_node`` is what all NICs of a node send at once."""

    gb_s_per_node: float
    efficiency: float
    hop_us: float
    base_us: float
    half_bytes: float

    def __post_init__(self) -> None:
        _require_positive(self, "nic", "gb_s_per_node")
        _require(0 < self.efficiency <= 1, "nic.efficiency", self.efficiency, "is a share in (0, 1]")
        for key in ("hop_us", "base_us", "half_bytes"):
            _require(getattr(self, key) >= 0, f"nic.{key}", getattr(self, key), "must not be negative")


@dataclass(frozen=True)
class ContentionProfile:
    """How much longer a kernel takes while the other kind runs beside it (1 = not at all)."""

    compute_slowdown: float
    communication_slowdown: float

    def __post_init__(self) -> None:
        for key in ("compute_slowdown", "communication_slowdown"):
            _require(
                getattr(self, key) >= 1, f"contention.{key}", getattr(self, key), "is a factor of at least 1"
            )


@dataclass(frozen=True)
class HostLinkProfile:
    """The link between a GPU and its host's memory (CPU offload, copies to and from the host)."""

    gb_s: float
    latency_us: float

    def __post_init__(self) -> None:
        _require_positive(self, "host_link", "gb_s")
        _require(self.latency_us >= 0, "host_link.latency_us", self.latency_us, "must not be negative")


@dataclass(frozen=True)
class HardwareProfile:
    """One kind of machine. ``estimated`` lists the dotted keys whose figures nobody measured."""

    name: str
    title: str
    source: str
    gpus_per_node: int
    memory: MemoryProfile
    compute: ComputeProfile
    gemm: GemmProfile
    attention: AttentionProfile
    bandwidth: BandwidthProfile
    cpu: CpuProfile
    nvlink: NvlinkProfile
    nic: NicProfile
    contention: ContentionProfile
    host_link: HostLinkProfile
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    estimated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.name), "name", self.name, "must not be empty")
        _require(
            bool(self.source), "source", self.source, "must not be empty: say where the figures come from"
        )
        _require(self.gpus_per_node >= 1, "gpus_per_node", self.gpus_per_node, "must be at least 1")
        for key in (*self.estimated, *self.sources):
            _require(_has_key(self, key), "estimated or sources", key, "names no key of a profile")

    @property
    def memory_bytes(self) -> int:
        """Total device memory as the driver reports it."""
        return int(self.memory.capacity_gib * GIB)

    @property
    def context_bytes(self) -> int:
        """What the CUDA context and libraries hold outside the caching allocator."""
        return int(self.memory.context_mib * MIB)

    @property
    def nccl_bytes_per_communicator(self) -> int:
        """What one NCCL communicator holds outside the caching allocator."""
        return int(self.memory.nccl_mib_per_communicator * MIB)

    @property
    def usable_memory_bytes(self) -> int:
        """What is left for the caching allocator with one communicator."""
        return self.memory_bytes - self.context_bytes - self.nccl_bytes_per_communicator

    @property
    def memory_bandwidth(self) -> float:
        """Peak memory bandwidth in bytes per second."""
        return self.memory.bandwidth_gb_s * 1e9

    @property
    def sm_count(self) -> int:
        """Number of streaming multiprocessors."""
        return self.compute.sm_count

    @property
    def peak_flops(self) -> dict[str, float]:
        """Dense peak in FLOP/s by compute type: bf16, fp16, tf32, fp32."""
        return {dtype: tflops * 1e12 for dtype, tflops in self.compute.peak_tflops.items()}


def profile_names() -> list[str]:
    """Names of the profiles that come with the package, sorted."""
    return sorted(path.stem for path in _PROFILE_FOLDER.glob("*.toml"))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Read a profile by its name (`profile_names`) or by the path of a TOML file.

    Raises `ProfileError` for an unknown name (nearest names are offered) and for a file that cannot be read,
    is no TOML, lacks a key, has an unknown key, or holds a value of a wrong type or range.
    """
    text = str(name_or_path)
    if text.lower() in profile_names():
        return parse_profile((_PROFILE_FOLDER / f"{text.lower()}.toml").read_text("utf-8"), text)
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        try:
            content = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"hardware profile {text}: cannot be read: {error}") from None
        return parse_profile(content, text)
    near = difflib.get_close_matches(text.lower(), profile_names(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(profile_names())}"
    raise ProfileError(f"unknown hardware {text!r}: {hint} A path to a .toml file is taken too.")


def parse_profile(content: str, origin: str) -> HardwareProfile:
    """Make a profile from TOML text; ``origin`` (a file name) begins every error message."""
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"hardware profile {origin}: no valid TOML: {error}") from None
    try:
        profile = _build(HardwareProfile, table, "")
    except ProfileError as error:
        raise ProfileError(f"hardware profile {origin}: {error}") from None
    assert isinstance(profile, HardwareProfile)
    return profile


def _has_key(profile: HardwareProfile, key: str) -> bool:
    node: Any = profile
    for part in key.split("."):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif hasattr(node, part):
            node = getattr(node, part)
        else:
            return False
    return True


def _build(cls: type, table: Mapping[str, Any], prefix: str) -> object:
    """Make a dataclass from a TOML table, checking keys and types; ``prefix`` is its place in the file."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(fields)}"
            raise ProfileError(f"unknown key {prefix}{key}{hint}")
    values = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ProfileError(f"lacks the key {prefix}{name}")
    try:
        return cls(**values)
    except ProfileError as error:
        # Curves do not know which table they stand in; sections name themselves.
        raise ProfileError(f"{prefix}{error}" if cls is LinkCurve else str(error)) from None


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Check one TOML value against a field's type and turn lists into tuples, tables into dataclasses."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ProfileError(f"{key} = {value!r}: must be a table")
        return _build(typing.cast(type, hint), value, key + ".")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProfileError(f"{key} = {value!r}: must be a list")
        inner = arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else float
        return tuple(_convert(inner, item, f"{key}[{index}]") for index, item in enumerate(value))
    if origin is not None:  # Mapping[str, X]
        if not isinstance(value, Mapping):
            raise ProfileError(f"{key} = {value!r}: must be a table")
        return types.MappingProxyType(
            {name: _convert(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
        )
    if hint is float and type(value) in (int, float):
        return float(value)
    if type(value) is hint:
        return value
    names = {float: "a number", int: "a whole number", str: "text"}
    raise ProfileError(f"{key} = {value!r}: must be {names.get(hint, hint)}")
