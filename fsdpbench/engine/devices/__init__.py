"""The three devices: real GPUs, real CPUs, simulated GPUs."""

from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.devices.base import Device, Placement


def make_device(config: Config, placement: Placement) -> Device:
    """Return the device of `config.device` for this rank, not yet opened."""
    if config.device == "sim":
        from fsdpbench.engine.devices.sim import SimDevice

        return SimDevice(config, placement)
    from fsdpbench.engine.devices.real import CpuDevice, CudaDevice

    return (CpuDevice if config.device == "cpu" else CudaDevice)(config, placement)
