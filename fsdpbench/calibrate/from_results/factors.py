"""What measured runs can scale in a profile, and the file with it.

compute   rates of matrix products and attention in training   gemm.under_load, attention.under_load
memory    bandwidth that memory-bound kernels reach            bandwidth.efficiency.*
network   what leaves a node                                   nic.gb_s_per_node
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdpbench.files.toml_text import to_toml
from fsdpbench.files.whole_files import write_whole
from fsdpbench.sim.hardware.profile import HardwareProfile, load_profile


class Factor(StrEnum):
    """A part of a profile that runs of one's own scale as a whole; above 1 it is faster."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"


@dataclass(frozen=True)
class ScaledProfile:
    """A profile (a packaged one's name, also with `+node-N+nic-M`) with some of its parts scaled."""

    base: str
    factors: Mapping[Factor, float]

    @property
    def _packaged(self) -> str:
        """The base without what its name states of a node."""
        return self.base.partition("+")[0]

    def keys(self) -> dict[str, dict[str, Any]]:
        """The scaled keys by section. A rate that would exceed the chip's peak is at it."""
        profile = load_profile(self.base)
        tables: dict[str, dict[str, Any]] = {}
        if (factor := self.factors.get(Factor.COMPUTE)) is not None:
            for name, section in (("gemm", profile.gemm), ("attention", profile.attention)):
                tables[name] = {"under_load": _share(section.under_load * factor)}
        if (factor := self.factors.get(Factor.MEMORY)) is not None:
            efficiency = profile.bandwidth.efficiency
            tables["bandwidth"] = {
                "efficiency": {kind: _share(share * factor) for kind, share in efficiency.items()}
            }
        network = self.factors.get(Factor.NETWORK)
        if network is not None or self.base != self._packaged:
            tables["nic"] = {"gb_s_per_node": round(profile.nic.gb_s_per_node * (network or 1.0), 4)}
        return tables

    def at_its_peak(self) -> list[str]:
        """Factors whose keys all are at what the chip can do at most."""
        tables = self.keys()
        shares = {
            Factor.COMPUTE: [tables.get(name, {}).get("under_load", 0.0) for name in ("gemm", "attention")],
            Factor.MEMORY: list(tables.get("bandwidth", {}).get("efficiency", {"": 0.0}).values()),
        }
        return [factor.value for factor, values in shares.items() if max(values) >= 1.0]

    def write(self, path: Path, sources: Mapping[str, str], source: str) -> HardwareProfile:
        """Write the profile's file; returns what it says."""
        profile = load_profile(self.base)
        head: dict[str, Any] = {"base": self._packaged, "name": path.stem, "title": profile.title}
        if self.base != self._packaged:
            head["gpus_per_node"] = profile.gpus_per_node
        write_whole(path, to_toml({**head, "source": source, **self.keys(), "sources": dict(sources)}))
        return load_profile(path)


def _share(value: float) -> float:
    return round(min(1.0, value), 4)
