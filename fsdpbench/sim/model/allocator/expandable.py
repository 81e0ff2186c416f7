"""The device memory under the allocator, and expandable segments.

Each stream and pool has one address range, into which pages are mapped as needed.

    |<------------- addresses of the segment ------------->|
    | allocated | free | allocated | free  |   unmapped    |
    |<----------- mapped pages ----------->|

If no free block fits, the allocator maps more pages after the last free block instead of requesting a new
segment. So a large free block at the end is never too small; its rest is only not mapped yet.
"""

from collections.abc import Callable

from fsdpbench.sim.model.allocator import pools
from fsdpbench.sim.model.allocator.conf import AllocatorCosts
from fsdpbench.sim.model.allocator.stats import AllocatorStats
from fsdpbench.sim.model.allocator.types import AllocatorClock, Block, StreamMoment

GIB = 1 << 30
# Addresses only grow and are never reused, so any use after release is noticed.
FIRST_ADDRESS = 0x7F00_0000_0000
_ALIGNMENT = 2 << 20

CallListener = Callable[[str, int, int], object]
"""Called after a driver call with the call's name and its start and end on the CPU in ns."""


class DeviceMemory:
    """Physical memory and address space of a device. Paged mapping avoids fragmentation."""

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
        """Return the number of unused physical bytes."""
        return self.capacity_bytes - self.used_bytes

    def reserve_addresses(self, nbytes: int) -> int:
        """Reserve a new address range without memory; return its first address."""
        address = self._next_address
        self._next_address += (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        return address

    def allocate(self, nbytes: int) -> int | None:
        """Return an address like cudaMalloc, or None without room; a refused call takes equally long."""
        began = self._clock.cpu_ns()
        self._clock.advance_cpu(self._costs.malloc_ns + nbytes * self._costs.malloc_ns_per_gib // GIB)
        self._tell("cudaMalloc", began)
        if nbytes > self.free_bytes:  # test_refused_driver_calls_do_not_wait_for_the_device
            return None
        self.used_bytes += nbytes
        return self.reserve_addresses(nbytes)

    def release(self, nbytes: int) -> None:
        """Release bytes like cudaFree, which waits for the whole device."""
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
        """Wait like cudaEventSynchronize, before blocks used on other streams are released."""
        began = self._clock.cpu_ns()
        self._clock.wait_cpu_until(moment)
        if self._clock.cpu_ns() > began:
            self._tell("cudaEventSynchronize", began)

    def _tell(self, call: str, began: int) -> None:
        if self.call_listener is not None:
            self.call_listener(call, began, self._clock.cpu_ns())


class ExpandableSegment:
    """An address range into which memory is mapped in pages of `page_size` bytes."""

    __slots__ = ("address", "page_size", "size", "stream")

    def __init__(self, address: int, size: int, page_size: int, stream: int) -> None:
        self.address = address
        self.size = size
        self.page_size = page_size
        self.stream = stream


class ExpandableSegments:
    """All expandable segments of a device; finds, maps and unmaps their blocks."""

    def __init__(self, device: DeviceMemory, stats: AllocatorStats, limit_bytes: int) -> None:
        self._device = device
        self._stats = stats
        self.limit_bytes = limit_bytes

    def allocate(self, pool: pools.BlockPool, size: int, stream: int) -> Block | None:
        """Return a free mapped block (in no pool) of at least `size` bytes, or None without memory."""
        block = self._find(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size), pool):
            return None
        while block.size < size:
            # A free block that is too small is followed by an unmapped one (`_has_room`): map the rest there.
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size), pool):
                return None
            block = following
        pool.remove(block)
        return block

    def release(self, block: Block, pool: pools.BlockPool) -> int:
        """Unmap the whole pages inside a free block of the pool; return the bytes released."""
        segment = block.expandable
        assert isinstance(segment, ExpandableSegment)
        page = segment.page_size
        first = -(-(block.address - segment.address) // page) * page + segment.address
        last = (block.address + block.size - segment.address) // page * page + segment.address
        if last <= first:
            return 0
        pool.remove(block)
        if first > block.address:
            pool.insert(pools.split_front(block, first - block.address, pool))
        if last < block.address + block.size:
            pool.insert(pools.split_back(block, last - block.address, pool))
        self._device.unmap_pages(last - first, page, block.stream)
        block.mapped = False
        pools.merge(block, block.prev, pool)
        pools.merge(block, block.next, pool)
        pool.insert_unmapped(block)
        self._stats.segment(pool.is_small, 0, first - last)
        self._stats.num_device_free += 1
        return last - first

    def _find(self, pool: pools.BlockPool, size: int, stream: int) -> Block:
        """Return the first block from which to map `size` bytes: unmapped, or free before an unmapped one."""
        for _, _, unmapped in pool.unmapped.get(stream, ()):
            start = unmapped
            before = unmapped.prev
            if before is not None and _is_available(before):
                start = before
            if _has_room(start, size):
                return start
        page = pools.SMALL_SEGMENT if pool.is_small else pools.LARGE_SEGMENT
        # Reserve 9/8 of the device's memory in addresses: one segment nearly always suffices.
        span = -(-(self._device.capacity_bytes * 9 // 8) // page) * page
        segment = ExpandableSegment(self._device.reserve_addresses(span), span, page, stream)
        block = Block(segment.address, span, stream, pool)
        block.expandable = segment
        block.mapped = False
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int, pool: pools.BlockPool) -> bool:
        """Map the first `size` bytes (rounded up to pages) of an unmapped block into the pool."""
        segment = block.expandable
        assert isinstance(segment, ExpandableSegment)
        page = segment.page_size
        mapped = min(-(-size // page) * page, block.size)
        reserved = self._stats.reserved_bytes
        if reserved + mapped > self.limit_bytes or not self._device.map_pages(mapped, page):
            return False
        pool.remove_unmapped(block)
        if mapped < block.size:
            pool.insert_unmapped(pools.split_back(block, mapped, pool))
        block.mapped = True
        pools.merge(block, block.prev, pool)
        pools.merge(block, block.next, pool)
        pool.insert(block)
        self._stats.segment(pool.is_small, 0, mapped)
        self._stats.num_device_alloc += 1
        return True


def _is_available(block: Block) -> bool:
    return not block.allocated and block.event_count == 0


def _has_room(block: Block, size: int) -> bool:
    found = 0
    current: Block | None = block
    while found < size and current is not None and _is_available(current):
        found += current.size
        current = current.next
    return found >= size
