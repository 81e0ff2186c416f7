"""What kernels and host calls cost in nanoseconds on one `HardwareProfile`."""

from fsdpbench.sim.costs.cpu import CpuCosts
from fsdpbench.sim.costs.kernels import KernelCosts

__all__ = ["CpuCosts", "KernelCosts"]
