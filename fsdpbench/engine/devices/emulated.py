"""`--emulate`: rank 0 of many on one real device. Everything is measured but the collectives' time.

CudaDevice, CpuDevice ── join() ──> NCCL, gloo            all ranks are real
EmulatedCuda, EmulatedCpu ─ join() ─> fsdpbench.engine.emulation  one rank is real, the network is a profile's
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.devices.cpu import CpuDevice
from fsdpbench.engine.devices.cuda import CudaDevice
from fsdpbench.engine.emulation import init_process_group
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import HardwareProfile, load_profile


class EmulatedCuda(CudaDevice):
    """The GPU of this process as rank 0 of `config.gpus`."""

    def _join(self) -> None:
        _join_emulated(self._config, self._placement)

    def describe(self) -> dict[str, Any]:
        return _labelled(super().describe(), self._config)


class EmulatedCpu(CpuDevice):
    """The CPU of this process as rank 0 of `config.gpus`; for trying emulation without a GPU."""

    def _join(self) -> None:
        _join_emulated(self._config, self._placement)

    def describe(self) -> dict[str, Any]:
        return _labelled(super().describe(), self._config)


def _join_emulated(config: Config, placement: Placement) -> None:
    network = Network(_profile(config), config.gpus, config.ranks_per_node)
    timeout = timedelta(seconds=config.measurement.timeout_s)
    init_process_group(network, placement.rank, timeout)


def _labelled(described: dict[str, Any], config: Config) -> dict[str, Any]:
    profile = _profile(config)
    measured = described["source"] if described["simulated"] else "measured on this machine"
    return described | {
        "emulated": True,
        "network": profile.name,
        "node_network": profile.node_words(config.ranks_per_node),
        "source": f"rank 0 of {config.gpus} {measured}; collectives take the time of the "
        f"network of {profile.title} ({profile.source})",
    }


def _profile(config: Config) -> HardwareProfile:
    assert config.hardware is not None, "an emulated configuration names the profile of its network"
    return load_profile(config.hardware)
