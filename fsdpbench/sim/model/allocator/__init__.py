"""The caching allocator of the simulated device: it behaves like CUDA's, in simulated time."""

from fsdpbench.sim.model.allocator.caching import CachingAllocator
from fsdpbench.sim.model.allocator.conf import AllocatorConf, AllocatorConfError, AllocatorCosts
from fsdpbench.sim.model.allocator.types import AllocatorAction, AllocatorEvent, Block, SimOutOfMemoryError
