"""The device's memory behind the allocator: effects and costs of cudaMalloc, cudaFree and page mapping."""

from collections.abc import Callable

from fsdpbench.sim.model.allocator.conf import AllocatorCosts
from fsdpbench.sim.model.allocator.types import AllocatorClock, StreamMoment

GIB = 1 << 30
# Addresses only grow and are never reused, so that a use after release cannot go unnoticed.
FIRST_ADDRESS = 0x7F00_0000_0000
_ALIGNMENT = 2 << 20

CallListener = Callable[[str, int, int], object]
"""Called after a driver call with its name, start and end on the CPU in ns."""


class DeviceMemory:
    """Physical memory and address space of a device; never fragments, since memory is mapped in pages."""

    def __init__(self, capacity_bytes: int, clock: AllocatorClock, costs: AllocatorCosts) -> None:
        if capacity_bytes <= 0:
            raise ValueError(f"capacity of {capacity_bytes} bytes: must be positive")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._clock = clock
        self._costs = costs
        self._next_address = FIRST_ADDRESS
        self.call_listener: CallListener | None = None

    @property
    def free_bytes(self) -> int:
        """Return the unused physical bytes."""
        return self.capacity_bytes - self.used_bytes

    def reserve_addresses(self, nbytes: int) -> int:
        """Return the first address of a new range without memory."""
        address = self._next_address
        self._next_address += (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        return address

    def allocate(self, nbytes: int) -> int | None:
        """Return an address as cudaMalloc, or None if there is no room; a refused call takes as long."""
        began = self._clock.cpu_ns()
        self._clock.advance_cpu(self._costs.malloc_ns + nbytes * self._costs.malloc_ns_per_gib // GIB)
        self._tell("cudaMalloc", began)
        if nbytes > self.free_bytes:  # test_refused_driver_calls_do_not_wait_for_the_device
            return None
        self.used_bytes += nbytes
        return self.reserve_addresses(nbytes)

    def release(self, nbytes: int) -> None:
        """Release bytes as cudaFree, which waits for the whole device."""
        began = self._clock.cpu_ns()
        self._clock.synchronize_device()
        self._clock.advance_cpu(self._costs.free_ns + nbytes * self._costs.free_ns_per_gib // GIB)
        self._tell("cudaFree", began)
        self.used_bytes -= nbytes

    def map_pages(self, nbytes: int, page_size: int) -> bool:
        """Map whole pages with cuMemCreate and cuMemMap; return False if there is no room."""
        pages, began = nbytes // page_size, self._clock.cpu_ns()
        self._clock.advance_cpu(pages * self._costs.malloc_ns + nbytes * self._costs.malloc_ns_per_gib // GIB)
        # One span covers the calls of all pages.
        self._tell("cuMemCreate", began)
        if nbytes > self.free_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def unmap_pages(self, nbytes: int, page_size: int, stream: int) -> None:
        """Unmap whole pages with cuMemUnmap, which waits for the stream that used them."""
        pages, began = nbytes // page_size, self._clock.cpu_ns()
        self._clock.wait_cpu_until(self._clock.stream_ready_ns(stream))
        self._clock.advance_cpu(pages * self._costs.free_ns + nbytes * self._costs.free_ns_per_gib // GIB)
        self._tell("cuMemUnmap", began)
        self.used_bytes -= nbytes

    def wait_until(self, moment: StreamMoment) -> None:
        """Wait with cudaEventSynchronize, before blocks used on other streams are released."""
        began = self._clock.cpu_ns()
        self._clock.wait_cpu_until(moment)
        if self._clock.cpu_ns() > began:
            self._tell("cudaEventSynchronize", began)

    def _tell(self, call: str, began: int) -> None:
        if self.call_listener is not None:
            self.call_listener(call, began, self._clock.cpu_ns())
