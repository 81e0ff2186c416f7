"""What a simulated device reports about itself and its run, beside the figures of steps."""

from __future__ import annotations

import sys
from typing import Any

from fsdpbench.configuration.config import Config
from fsdpbench.sim import Simulation
from fsdpbench.sim.followers.account import MemoryAccount
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.software import CURRENT, load_software


class Tells:
    """Holds what is told of: profile, software, the simulation once started, the account if one is kept."""

    def __init__(self, config: Config, profile: HardwareProfile) -> None:
        self._config = config
        self._profile = profile
        self._software = load_software(config.software or CURRENT)
        self._simulation: Simulation | None = None
        self._account: MemoryAccount | None = None

    def describe(self) -> dict[str, Any]:
        described = {
            "name": self._profile.name,
            "title": self._profile.title,
            "simulated": True,
            "source": self._profile.source,
            "memory_bytes": self._profile.memory_bytes,
        }
        if self._config.gpus > self._config.ranks_per_node:
            described["node_network"] = self._profile.node_words(self._config.ranks_per_node)
        if self._config.jitter is not None:
            told = self._config.jitter.to_text()
            described |= {"jitter": told, "title": f"{self._profile.title} with jitter ({told})"}
        if self._config.software is not None:
            described |= {"software": self._software.name, "software_source": self._software.source}
        return described

    @property
    def sanitizer(self) -> dict[str, Any] | None:
        """What the sanitizer has found so far, if it runs."""
        found = None if self._simulation is None else self._simulation.sanitizer
        return None if found is None else found.to_dict()

    @property
    def memory_account(self) -> dict[str, Any] | None:
        """Who holds memory now, if account is kept."""
        return None if self._account is None else self._account.report()

    @property
    def unknown_operators(self) -> dict[str, int]:
        """Operators costed by their bytes alone, with how often they ran."""
        return self._open_simulation().unknown_operators

    def memory_traffic(self, steps: int) -> dict[str, Any]:
        """Bytes that a mean traced step reads and writes in kernels that memory limits; ``steps`` traced."""
        return {"bytes": round(self._open_simulation().accelerator.bytes_traced / steps)}

    @property
    def compilation(self) -> dict[str, Any] | None:
        """What was compiled, if anything was."""
        front_end = sys.modules.get("fsdpbench.sim.torch_device.compile.front_end")
        return front_end.told() if front_end is not None else None

    def _open_simulation(self) -> Simulation:
        if self._simulation is None:
            raise RuntimeError("the simulated device is used before open()")
        return self._simulation
