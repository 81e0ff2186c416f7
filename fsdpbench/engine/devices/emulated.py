"""`--emulate`: rank 0 of many on one real device. Everything is measured but the collectives' time.

CudaDevice, CpuDevice ──> `_join` ──> NCCL, gloo                     all ranks are real
EmulatedCuda, EmulatedCpu ─> `_join` ─> fsdpbench.engine.emulation   one is, the network is a profile's
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.devices.cpu import CpuDevice, RealDevice
from fsdpbench.engine.devices.cuda import CudaDevice
from fsdpbench.engine.emulation import init_process_group
from fsdpbench.sim.model.network import Network
from fsdpbench.sim.model.profile import HardwareProfile, load_profile


class _Emulated(RealDevice):
    """One device as rank 0 of `config.gpus`."""

    def _join(self, backend: str, device: torch.device | None = None) -> None:
        network = Network(_profile(self._config), self._config.gpus, self._config.ranks_per_node)
        timeout = timedelta(seconds=self._config.measurement.timeout_s)
        init_process_group(network, self._placement.rank, timeout)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = super().describe()  # type: ignore[misc]
        profile = _profile(self._config)
        measured = described["source"] if described["simulated"] else "measured on this machine"
        return described | {
            "emulated": True,
            "network": profile.name,
            "node_network": profile.node_words(self._config.ranks_per_node),
            "source": f"rank 0 of {self._config.gpus} {measured}; collectives take the time of the "
            f"network of {profile.title} ({profile.source})",
        }


class EmulatedCuda(_Emulated, CudaDevice):
    """The GPU of this process as rank 0 of `config.gpus`."""


class EmulatedCpu(_Emulated, CpuDevice):
    """The CPU of this process as rank 0 of `config.gpus`; for trying emulation without a GPU."""


def _profile(config: Config) -> HardwareProfile:
    assert config.hardware is not None, "an emulated configuration names the profile of its network"
    return load_profile(config.hardware)
