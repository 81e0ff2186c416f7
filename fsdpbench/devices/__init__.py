"""The three devices: real GPUs, real CPUs, simulated GPUs; and one real device in place of many."""

from __future__ import annotations

from fsdpbench.configuration.config import Config
from fsdpbench.devices.base import Device, Placement


def make_device(config: Config, placement: Placement) -> Device:
    """The device of `config.device` for this rank, not yet opened."""
    if config.device == "sim":
        from fsdpbench.devices.sim import SimDevice

        return SimDevice(config, placement)
    if config.emulate:
        from fsdpbench.devices.emulated import EmulatedCpu, EmulatedCuda

        return EmulatedCpu(config, placement) if config.device == "cpu" else EmulatedCuda(config, placement)
    if config.device == "cpu":
        from fsdpbench.devices.cpu import CpuDevice

        return CpuDevice(config, placement)
    from fsdpbench.devices.cuda import CudaDevice

    return CudaDevice(config, placement)
