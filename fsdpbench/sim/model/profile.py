"""Hardware profiles: all that the simulator knows about a machine, read from one TOML file.

Each file names its sources and lists estimated figures in ``estimated``. Properties of `HardwareProfile`
derive values in the simulator's units (bytes, FLOP/s).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from fsdpbench.base.errors import error_text
from fsdpbench.base.numbers import finite_number
from fsdpbench.base.reading import JsonObject
from fsdpbench.sim.model import sections
from fsdpbench.sim.model.keys import ProfileError, check_figures, far_figures
from fsdpbench.sim.model.profile_files import ProfileFolder

_PCIE_GB_S = 63  # PCIe 5.0 x16, each way
# Forward and backward rates relative to flash attention 2 (FlexAttention's announcement, 2024), and doubt.
_FLEX = (0.9, 0.85, 1.4)


@dataclass(frozen=True)
class HardwareProfile:
    """A kind of machine. `estimated` lists the dotted keys of figures that were not measured.

    `libraries`: tables of isolated operators; those in `runs_use` price training runs.
    `attention_kernels`: kernels that a configuration can request by name (`with_attention`).
    """

    name: str
    title: str
    source: str
    gpus_per_node: int
    memory: sections.MemoryProfile
    compute: sections.ComputeProfile
    gemm: sections.GemmProfile
    attention: sections.AttentionProfile
    bandwidth: sections.BandwidthProfile
    cpu: sections.CpuProfile
    nvlink: sections.NvlinkProfile
    nic: sections.NicProfile
    contention: sections.ContentionProfile
    host_link: sections.HostLinkProfile
    storage: sections.StorageProfile = dataclasses.field(default_factory=sections.StorageProfile)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    estimated: tuple[str, ...] = ()
    libraries: Mapping[str, sections.LibraryTables] = dataclasses.field(default_factory=dict)
    runs_use: tuple[str, ...] = ()
    older: sections.OlderKernels | None = None
    attention_kernels: Mapping[str, sections.AttentionKernel] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ProfileError("name must not be empty")
        if not self.source:
            raise ProfileError("source must not be empty: say where the figures come from")
        check_figures(self)
        for name in self.runs_use:
            if name not in self.libraries:
                known = ", ".join(self.libraries) or "none"
                raise ProfileError(error_text("profile.no_library", name, known))
        for key in (*self.estimated, *self.sources):
            if not _has_key(self, key):
                raise ProfileError(f"estimated or sources name {key!r}, which is not a key of a profile")

    @property
    def memory_bytes(self) -> int:
        """Return the device's total memory in bytes, as reported by the driver."""
        return int(self.memory.capacity_gib * sections.GIB)

    @property
    def context_bytes(self) -> int:
        """Return the bytes that the CUDA context and libraries use outside the caching allocator."""
        return int(self.memory.context_mib * sections.MIB)

    @property
    def usable_memory_bytes(self) -> int:
        """Return the bytes available to the caching allocator with one communicator."""
        return (
            self.memory_bytes - self.context_bytes - int(self.memory.nccl_mib_per_communicator * sections.MIB)
        )

    @property
    def has_pcie_links(self) -> bool:
        """Return whether a node's links are no faster than PCIe, whose rates differ between machines."""
        return self.nvlink.peak_gb_s <= _PCIE_GB_S

    @property
    def link_gb_s(self) -> float:
        """Return the peak GB/s of links inside a node; over PCIe, that of two GPUs without other traffic."""
        rates = [self.nvlink.peak_gb_s]
        for tables in self.libraries.values() if self.has_pcie_links else ():
            for curve in (
                *tables.collectives.get("all_gather", ()),
                *tables.collectives.get("reduce_scatter", ()),
            ):
                rates += [size * (1 - 1 / curve.ranks) / us / 1e3 for size, us in curve.points]
        return max(rates)

    @property
    def memory_bandwidth(self) -> float:
        """Return the peak memory bandwidth in bytes/s."""
        return self.memory.bandwidth_gb_s * 1e9

    @property
    def sm_count(self) -> int:
        """Return the number of streaming multiprocessors."""
        return self.compute.sm_count

    @property
    def peak_flops(self) -> dict[str, float]:
        """Return the dense peaks in FLOP/s by compute type: bf16, fp16, tf32, fp32."""
        return {dtype: tflops * 1e12 for dtype, tflops in self.compute.peak_tflops.items()}

    def with_older_kernels(self) -> "HardwareProfile":
        """Return this machine with kernels from before torch 2.11 and CUDA 13, if they differ."""
        if self.older is None:
            return self
        gemm = dataclasses.replace(self.gemm, weight_grad=self.older.gemm.weight_grad)
        return dataclasses.replace(self, attention=self.older.attention, gemm=gemm)

    def with_attention(self, kernel: str) -> "HardwareProfile":
        """Return this machine with attention by `kernel`, a value of the setting `attention`.

        Raises `ProfileError` if no figures of the kernel on this chip are known.
        """
        own, older = self.attention, self.older
        if kernel in ("auto", "math") or (kernel == own.kernel and older is None):
            return self  # "math" is priced operator by operator
        torchs = {each.kernel: each for each in (own if older is None else older.attention, own)}
        known = {**self.attention_kernels, **torchs}
        if flash := known.get("flash2"):
            known["flex"] = dataclasses.replace(flash.times(*_FLEX[:2]), doubt=flash.doubt * _FLEX[2])
        if kernel not in known:
            others = ", ".join(sorted(known))
            raise ProfileError(error_text("profile.no_kernel", kernel, self.name, others, kernel))
        chosen = dataclasses.replace(known[kernel], kernel=kernel)
        tables = {name: dataclasses.replace(each, attention=None) for name, each in self.libraries.items()}
        of_both = older and dataclasses.replace(older, attention=chosen)
        return dataclasses.replace(self, attention=chosen, libraries=tables, older=of_both)

    def with_nodes(self, gpus: int | None, nic_gb_s: float | None) -> "HardwareProfile":
        """Return this machine with `gpus` GPUs and `nic_gb_s` of network per node; None: unchanged.

        NICs belong to GPUs: without `nic_gb_s`, half the GPUs have half the network.
        """
        node = self.gpus_per_node if gpus is None else gpus
        rate = self.nic.gb_s_per_node * node / self.gpus_per_node if nic_gb_s is None else nic_gb_s
        changed = dataclasses.replace(self, name=_name(self.name, gpus, nic_gb_s), gpus_per_node=node)
        changed = dataclasses.replace(changed, nic=dataclasses.replace(self.nic, gb_s_per_node=rate))
        words = changed.node_words() if gpus is not None else f"{rate:g} GB/s a node"
        return dataclasses.replace(changed, title=f"{self.title}, {words}")

    def doubts(self) -> list[str]:
        """Return a message for each reason to doubt simulations of this machine."""
        compute, links = self.compute, self.nvlink.curve_ranks
        lanes = compute.sm_count * compute.fp32_lanes
        clock = compute.peak_tflops["fp32"] * 1e3 / (2 * lanes)
        return [
            *contradictions(self),
            *far_figures(self),
            *[f"compute.peak_tflops.fp32: {lanes:,} lanes would need a clock of {clock:.3g} GHz"]
            * (not 0.3 <= clock <= 6),
            *[f"nodes of {self.gpus_per_node} GPUs: links inside a node are known among {links}"]
            * (self.gpus_per_node > 2 * links),
        ]

    def node_words(self, used: int = 1 << 62) -> str:
        """Describe the network of a node with `used` GPUs in use: `50 GB/s a node of 4 GPUs`."""
        gpus = f"{self.gpus_per_node} GPU" + "s" * (self.gpus_per_node != 1)
        words = f"{self.nic.gb_s_per_node:g} GB/s a node of {gpus}"
        if used >= self.gpus_per_node:
            return words
        rate = self.nic.gb_s_per_node * used / self.gpus_per_node
        return f"{words}, {used} of them used ({rate:g} GB/s)"

    @property
    def narrow_peak_flops(self) -> dict[str, float]:
        """Return dense peaks in FLOP/s of the types below 16 bits for which libraries have tables."""
        tables = [table for library in self.libraries.values() for table in library.products.items()]
        return {dtype: table.peak_tflops * 1e12 for dtype, table in tables if dtype not in sections.DTYPES}


def _rebased(below: JsonObject, above: JsonObject) -> None:
    """Adjust the table of a base profile to the file that extends it.

    NICs belong to GPUs: if a file changes only the GPUs per node, the network scales with them. Tables of
    operators and kernels belong to one chip: if the file changes the peaks, they are dropped unless they
    price training runs, and the older of two generations of kernels is used.
    """
    compute = above.get("compute")  # of any type yet, as what is in it
    peaks = compute.get("peak_tflops") if isinstance(compute, dict) else None
    other_chip, bf16 = peaks is not None, peaks.get("bf16") if isinstance(peaks, dict) else None
    same = not other_chip or bf16 == below["compute"]["peak_tflops"]["bf16"]
    kernels = below.pop("attention_kernels", {})
    if other_chip and (older := below.pop("older", None)) is not None:
        kernels, own = {"flash2": older["attention"], **kernels}, below["attention"]
        below["attention"], below["gemm"] = older["attention"], {**below["gemm"], **older["gemm"]}
        if same:  # `calibrate` writes such files: the measured kernel is torch's default
            below["attention"] = {**below["attention"], "kernel": own["kernel"]}
        older_last = sorted(below["sources"].items(), key=lambda item: item[0].startswith("older."))
        below["sources"] = {name.removeprefix("older."): text for name, text in older_last}
    below["attention_kernels"] = kernels if same else {}
    if other_chip and not below.get("runs_use"):
        below["libraries"] = {}
    gpus, nic = above.get("gpus_per_node"), above.get("nic", {})
    if type(gpus) is int and isinstance(nic, dict) and "gb_s_per_node" not in nic:
        rate = below["nic"]["gb_s_per_node"] * gpus / below["gpus_per_node"]
        below["nic"] = {**below["nic"], "gb_s_per_node": rate}


def contradictions(profile: HardwareProfile) -> Iterator[str]:
    """Yield a message for each contradiction between figures."""
    for name, value, bound, most in _bounds(profile):
        if value > most:
            yield f"{name} = {value:g}: must not exceed {bound}, {most:g}"


def _bounds(profile: HardwareProfile) -> Iterator[tuple[str, float, str, float]]:
    memory, attention, links = profile.memory, profile.attention, profile.nvlink
    outside = memory.context_mib + memory.nccl_mib_per_communicator
    room = memory.capacity_gib * 1024 - 1
    yield "memory.context_mib + nccl_mib_per_communicator", outside, "the memory", room
    yield "host_link.gb_s", profile.host_link.gb_s, "memory.bandwidth_gb_s", memory.bandwidth_gb_s
    kernels = max(profile.bandwidth.efficiency.values()) * profile.bandwidth.fused_gain
    yield "bandwidth.efficiency x bandwidth.fused_gain", kernels, "the memory's bandwidth", 1.0
    peak = max(profile.compute.peak_tflops["bf16"], profile.compute.peak_tflops["fp16"])
    yield "attention.forward_tflops", attention.forward_tflops, "compute.peak_tflops", peak
    yield "attention.backward_tflops", attention.backward_tflops, "compute.peak_tflops", peak
    for name, tables in profile.libraries.items():
        rate = tables.attention.forward_tflops if tables.attention is not None else 0.0
        yield f"libraries.{name}.attention.forward_tflops", rate, "compute.peak_tflops", peak
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        fastest = max(rate for _, rate in getattr(links, kind).points)
        yield f"nvlink.{kind}.points: GB/s", fastest, "twice nvlink.peak_gb_s", 2 * links.peak_gb_s


def _judge(profile: HardwareProfile) -> None:
    for contradiction in contradictions(profile):
        raise ProfileError(contradiction)


_PROFILES = ProfileFolder(
    "hardware", Path(__file__).parents[1] / "profiles", HardwareProfile, _rebased, _judge
)


profile_names, parse_profile = _PROFILES.names, _PROFILES.parse


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Load a profile by name (`profile_names`) or from the path of a TOML file.

    Raises `ProfileError` for an unknown name (and suggests the nearest) and for a file that cannot be read,
    is not TOML, lacks a key, has an unknown key, or has a value of a wrong type or out of range.
    `h100-80gb+node-4+nic-50` is a profile with 4 GPUs and 50 GB/s of network per node.
    """
    base, gpus, nic_gb_s = _parts(name_or_path)
    profile = _PROFILES.load(base)
    return profile if gpus is nic_gb_s is None else profile.with_nodes(gpus, nic_gb_s)


def stated_machine(hardware: str, gpus_per_node: int | None, nic_gb_s: float | None = None) -> str:
    """Return the name of `hardware` with this many GPUs and this much network (each way) per node.

    Raises `ProfileError` if the name contradicts the arguments, or if the machine is impossible.
    """
    base, gpus, rate = _parts(hardware)
    if gpus_per_node is not None and gpus is None and _PROFILES.load(base).gpus_per_node == gpus_per_node:
        gpus_per_node = None
    for flag, stated, known in (("--gpus-per-node", gpus_per_node, gpus), ("--nic-gb-s", nic_gb_s, rate)):
        if stated is not None and known is not None and stated != known:
            raise ProfileError(error_text("profile.stated_twice", hardware, known, flag, stated))
    gpus = gpus if gpus_per_node is None else gpus_per_node
    name = _name(str(base), gpus, rate if nic_gb_s is None else nic_gb_s)
    try:
        load_profile(name)
    except ProfileError as error:
        if gpus_per_node is nic_gb_s is None:
            raise
        raise ProfileError(f"{error} (--gpus-per-node and --nic-gb-s state a node)") from None
    return name


def profile_layers(name_or_path: str | Path) -> list[tuple[str, frozenset[str]]]:
    """Return (name, keys that it sets) of each file of a profile, from its own to its last base."""
    base, gpus, nic_gb_s = _parts(name_or_path)
    stated = {"gpus_per_node": gpus, "nic": nic_gb_s}
    keys = frozenset(key for key, value in stated.items() if value is not None)
    return [(str(name_or_path), keys)] * bool(keys) + _PROFILES.layers(base)


_STATED = re.compile(r"(.+?)(?:\+node-([0-9]{1,9}))?(?:\+nic-([0-9.]+(?:e[+-]?[0-9]+)?))?", re.DOTALL)


def _parts(name_or_path: str | Path) -> tuple[str | Path, int | None, float | None]:
    """Split `h100-80gb+node-4+nic-50` into the profile's name or path, GPUs per node and GB/s per node."""
    found = _STATED.fullmatch(str(name_or_path))
    if found is None or (found[2] is None and found[3] is None):
        return name_or_path, None, None
    try:
        rate = None if found[3] is None else finite_number(found[3])
        return found[1], None if found[2] is None else int(found[2]), rate
    except ValueError:
        raise ProfileError(f"hardware {name_or_path}: {found[3]!r} is not a number of GB/s") from None


def _name(base: str, gpus: int | None, nic_gb_s: float | None) -> str:
    """Return `h100-80gb+node-4+nic-50`, with the exact number if six digits are not enough."""
    node = "" if gpus is None else f"+node-{gpus}"
    if nic_gb_s is None:
        return base + node
    short = f"{nic_gb_s:g}"
    return f"{base}{node}+nic-{short if float(short) == nic_gb_s else repr(nic_gb_s)}"


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


_FITTED_TO = 8


def of_slowest(profile: HardwareProfile, ranks: int) -> HardwareProfile:
    """Return `profile` with the rates of the slowest of `ranks` GPUs, which determines a data-parallel step.

    Under a power limit each chip reaches its own clock. With a spread s (standard deviation over mean,
    `compute.clock_spread`), the slowest of n is expected at mean x (1 - s x z(n)); z is `expected_largest`:
        n       1     8    64   512   2048
        z(n)    0   1.43  2.34  3.03  3.43
    A profile's rates under load were fitted to runs of at least 8 GPUs, so they are those of the slowest of
    8. Clocks affect kernels that are limited by arithmetic; memory-bound kernels do not change.
    """
    slower = 1 + profile.compute.clock_spread * (expected_largest(ranks) - expected_largest(_FITTED_TO))
    return dataclasses.replace(
        profile,
        gemm=dataclasses.replace(profile.gemm, under_load=min(1.0, profile.gemm.under_load / slower)),
        attention=dataclasses.replace(
            profile.attention, under_load=min(1.0, profile.attention.under_load / slower)
        ),
    )


def expected_largest(draws: int) -> float:
    """Return the expected maximum of n normal draws, in standard deviations above the mean (Blom 1958)."""
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))
