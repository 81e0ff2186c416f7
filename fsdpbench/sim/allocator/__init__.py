"""The caching allocator of the simulated device: the behaviour of CUDA's, with simulated time."""

from fsdpbench.sim.allocator.caching import CachingAllocator
from fsdpbench.sim.allocator.conf import AllocatorConf, AllocatorConfError
from fsdpbench.sim.allocator.types import AllocatorClock, Block, SimOutOfMemoryError

__all__ = [
    "AllocatorClock",
    "AllocatorConf",
    "AllocatorConfError",
    "Block",
    "CachingAllocator",
    "SimOutOfMemoryError",
]
