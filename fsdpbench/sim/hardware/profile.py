"""Hardware profiles: everything the simulator knows about a machine, read from one TOML file.

Every file names its sources; estimated figures are listed in its ``estimated``. Derived values
in the simulator's units (bytes, FLOP/s) are properties of `HardwareProfile`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.numbers import finite_number
from fsdpbench.sim.hardware.library_sections import LibraryTables
from fsdpbench.sim.hardware.profile_files import ProfileFolder
from fsdpbench.sim.hardware.sections import (
    DTYPES,
    GIB,
    MIB,
    AttentionProfile,
    BandwidthProfile,
    ComputeProfile,
    ContentionProfile,
    CpuProfile,
    GemmProfile,
    HostLinkProfile,
    LinkCurve,
    MemoryProfile,
    NicProfile,
    NicProtocol,
    NvlinkProfile,
    ProfileError,
)

__all__ = [
    "DTYPES",
    "HardwareProfile",
    "LinkCurve",
    "NicProtocol",
    "ProfileError",
    "load_profile",
    "parse_profile",
    "profile_layers",
    "profile_names",
    "with_nic",
]


@dataclass(frozen=True)
class HardwareProfile:
    """One kind of machine. ``estimated`` lists the dotted keys whose figures were not measured.

    ``libraries`` are tables of isolated operators, of which those in ``runs_use`` price training runs.
    """

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
    libraries: Mapping[str, LibraryTables] = dataclasses.field(default_factory=dict)
    runs_use: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ProfileError("name must not be empty")
        if not self.source:
            raise ProfileError("source must not be empty: say where the figures come from")
        if self.gpus_per_node < 1:
            raise ProfileError(f"gpus_per_node = {self.gpus_per_node}: must be at least 1")
        for name in self.runs_use:
            if name not in self.libraries:
                known = ", ".join(self.libraries) or "none"
                raise ProfileError(
                    f"runs_use names {name!r}, which is not a library of this profile: {known}"
                )
        for key in (*self.estimated, *self.sources):
            if not _has_key(self, key):
                raise ProfileError(f"estimated or sources name {key!r}, which is not a key of a profile")

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

    @property
    def narrow_peak_flops(self) -> dict[str, float]:
        """Dense peak in FLOP/s of the types below 16 bits, as far as libraries have tables of them."""
        tables = [table for library in self.libraries.values() for table in library.products.items()]
        return {dtype: table.peak_tflops * 1e12 for dtype, table in tables if dtype not in DTYPES}


_PROFILES = ProfileFolder("hardware", Path(__file__).parents[1] / "profiles", HardwareProfile)


def profile_names() -> list[str]:
    """Names of the profiles that come with the package, sorted."""
    return _PROFILES.names()


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """Read a profile by its name (`profile_names`) or by the path of a TOML file.

    Raises `ProfileError` for an unknown name (nearest names are offered) and for a file that cannot be read,
    is not TOML, lacks a key, has an unknown key, or holds a value of a wrong type or range.

    `h100-80gb+nic-50` is a profile with 50 GB/s of network a node.
    """
    base, rate = _without_nic(name_or_path)
    profile = _PROFILES.load(base)
    if rate is None:
        return profile
    return dataclasses.replace(
        profile,
        name=f"{profile.name}+nic-{rate:g}",
        title=f"{profile.title}, {rate:g} GB/s a node",
        nic=dataclasses.replace(profile.nic, gb_s_per_node=rate),
    )


def with_nic(hardware: str, gb_s_per_node: float) -> str:
    """The name of `hardware` with so much network a node, each way."""
    return f"{hardware}+nic-{gb_s_per_node:g}"


def profile_layers(name_or_path: str | Path) -> list[tuple[str, frozenset[str]]]:
    """The files that a profile is made of, from its own to its last base: name, and the keys given there."""
    base, rate = _without_nic(name_or_path)
    own = [] if rate is None else [(str(name_or_path), frozenset(("nic",)))]
    return own + _PROFILES.layers(base)


_WITH_NIC = re.compile(r"(.+)\+nic-([0-9.]+(?:e[+-]?[0-9]+)?)")


def _without_nic(name_or_path: str | Path) -> tuple[str | Path, float | None]:
    """A profile's name or path, and the GB/s a node that stand behind it."""
    found = _WITH_NIC.fullmatch(str(name_or_path))
    if found is None:
        return name_or_path, None
    try:
        return found[1], finite_number(found[2])
    except ValueError:
        raise ProfileError(f"hardware {name_or_path}: {found[2]!r} is not a number of GB/s") from None


def parse_profile(content: str | bytes, origin: str) -> HardwareProfile:
    """Make a profile from TOML text; ``origin`` (a file name) begins every error message."""
    return _PROFILES.parse(content, origin)


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
