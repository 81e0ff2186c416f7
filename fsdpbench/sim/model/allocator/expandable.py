"""Expandable segments: one range of addresses a stream and pool, to which pages are mapped as needed.

    |<------------- addresses of the segment ------------->|
    | allocated | free | allocated | free  |   unmapped    |
    |<----------- mapped pages ----------->|

A request that does not fit a free block maps more pages behind the last free block and grows it, instead of
asking the driver for a new segment. So a large free block at the end is never too small, only not yet mapped.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from fsdpbench.sim.model.allocator.conf import POWER2_INTERVALS, UNLIMITED, AllocatorConf
from fsdpbench.sim.model.allocator.driver import DeviceMemory
from fsdpbench.sim.model.allocator.stats import AllocatorStats
from fsdpbench.sim.model.allocator.types import Block


class ExpandableSegment:
    """A range of addresses whose memory is mapped in pages of ``page_size``."""

    __slots__ = ("address", "mapped_pages", "page_size", "size", "stream")

    def __init__(self, address: int, size: int, page_size: int, stream: int) -> None:
        self.address = address
        self.size = size
        self.page_size = page_size
        self.stream = stream
        self.mapped_pages = 0


class ExpandableSegments:
    """Finds, maps and unmaps blocks of all expandable segments of a device."""

    def __init__(self, device: DeviceMemory, stats: AllocatorStats, limit_bytes: int) -> None:
        self._device = device
        self._stats = stats
        self._limit = limit_bytes

    def allocate(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """A free mapped block (in no pool) of at least ``size`` bytes, or None if memory runs out."""
        block = self._find(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size), pool):
            return None
        while block.size < size:
            # Behind a free block that is too small lies an unmapped one: map of it what is missing.
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size), pool):
                return None
            block = following
        pool.remove(block)
        return block

    def release(self, block: Block, pool: BlockPool) -> int:
        """Unmap the whole pages inside a free block (in the pool); returns the bytes given back."""
        segment = block.expandable
        assert isinstance(segment, ExpandableSegment)
        page = segment.page_size
        first = -(-(block.address - segment.address) // page) * page + segment.address
        last = (block.address + block.size - segment.address) // page * page + segment.address
        if last <= first:
            return 0
        pool.remove(block)
        if first > block.address:
            pool.insert(split_front(block, first - block.address, pool))
        if last < block.address + block.size:
            pool.insert(split_back(block, last - block.address, pool))
        self._device.unmap_pages(last - first, page, block.stream)
        segment.mapped_pages -= (last - first) // page
        block.mapped = False
        merge(block, block.prev, pool)
        merge(block, block.next, pool)
        pool.insert_unmapped(block)
        self._stats.segment(pool.is_small, 0, first - last)
        self._stats.num_device_free += 1
        return last - first

    def _find(self, pool: BlockPool, size: int, stream: int) -> Block:
        """The first block, unmapped or free before an unmapped one, from which ``size`` bytes can be had."""
        for _, _, unmapped in pool.unmapped.get(stream, ()):
            start = unmapped
            before = unmapped.prev
            if before is not None and _is_available(before):
                start = before
            if _has_room(start, size):
                return start
        page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
        # An eighth more addresses than the device has memory, so that one segment nearly always suffices.
        span = -(-(self._device.capacity_bytes * 9 // 8) // page) * page
        segment = ExpandableSegment(self._device.reserve_addresses(span), span, page, stream)
        block = Block(segment.address, span, stream, pool)
        block.expandable = segment
        block.mapped = False
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int, pool: BlockPool) -> bool:
        """Map the first ``size`` bytes (rounded up to pages) of an unmapped block; they go into the pool."""
        segment = block.expandable
        assert isinstance(segment, ExpandableSegment)
        page = segment.page_size
        mapped = min(-(-size // page) * page, block.size)
        reserved = self._stats.reserved_bytes
        if reserved + mapped > self._limit or not self._device.map_pages(mapped, page):
            return False
        pool.remove_unmapped(block)
        if mapped < block.size:
            pool.insert_unmapped(split_back(block, mapped, pool))
        block.mapped = True
        segment.mapped_pages += mapped // page
        merge(block, block.prev, pool)
        merge(block, block.next, pool)
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


MIB = 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE_ALLOCATION = 10 * MIB
ROUND_LARGE = 2 * MIB
_MIB_BITS = 20


def block_size(nbytes: int, conf: AllocatorConf) -> int:
    """What a request of ``nbytes`` occupies: a multiple of 512, or a division of a power of two if set so."""
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    table = conf.roundup_power2_divisions
    if table:
        divisions = table[min(max(nbytes.bit_length() - 1 - _MIB_BITS, 0), POWER2_INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return _next_division(nbytes, divisions)
    return (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK


def _next_division(nbytes: int, divisions: int) -> int:
    """Round up to the next of ``divisions`` equal steps between two powers of two."""
    floor = 1 << (nbytes.bit_length() - 1)
    if nbytes == floor:
        return nbytes
    step = floor // divisions
    return 2 * floor if step == 0 else -(-nbytes // step) * step


def segment_size(size: int) -> int:
    """What is asked of the driver for a block of ``size``."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def split_front(block: Block, size: int, pool: BlockPool) -> Block:
    """Cut the first ``size`` bytes off ``block`` and return them as a new block; ``block`` keeps the rest.

    The rest is not put into a pool: that is for the caller, who knows whether it is mapped.
    """
    front = Block(block.address, size, block.stream, pool)
    front.expandable = block.expandable
    front.mapped = block.mapped
    front.prev = block.prev
    if front.prev is not None:
        front.prev.next = front
    front.next = block
    block.prev = front
    block.address += size
    block.size -= size
    return front


def split_back(block: Block, size: int, pool: BlockPool) -> Block:
    """Cut everything behind the first ``size`` bytes off ``block`` and return it as a new block."""
    back = Block(block.address + size, block.size - size, block.stream, pool)
    back.expandable = block.expandable
    back.mapped = block.mapped
    back.next = block.next
    if back.next is not None:
        back.next.prev = back
    back.prev = block
    block.next = back
    block.size = size
    return back


def merge(block: Block, neighbour: Block | None, pool: BlockPool) -> int:
    """Let ``block`` (in no pool) swallow a free neighbour; returns the bytes it grew by, 0 if it cannot.

    A neighbour is free if it is not in use, no stream's event is outstanding on it, and its memory is mapped
    (or not) as the block's is.
    """
    if (
        neighbour is None
        or neighbour.allocated
        or neighbour.event_count
        or neighbour.mapped is not block.mapped
    ):
        return 0
    if neighbour.mapped:
        pool.remove(neighbour)
    else:
        pool.remove_unmapped(neighbour)
    if block.prev is neighbour:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size
    return neighbour.size


# Free blocks, kept sorted by size and address, a list for each stream.
# Torch keeps one ordered set for all streams, ordered by (stream, size, address), and looks only at one
# stream's part of it; a list a stream is the same order with shorter searches.

# (size, address, block): addresses differ, so that blocks themselves are never compared.
FreeEntry = tuple[int, int, Block]


class BlockPool:
    """The small or the large pool: mapped free blocks, and the unmapped rest of expandable segments."""

    __slots__ = ("free", "is_small", "kept", "searches", "unmapped")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.free: dict[int, list[FreeEntry]] = {}
        self.unmapped: dict[int, list[FreeEntry]] = {}
        # Streams whose free blocks are never given back: a captured graph will use their addresses again.
        self.kept: set[int] = set()
        # Age of free blocks for garbage collection: searches since they were put here.
        self.searches = 0

    def insert(self, block: Block) -> None:
        """A mapped block becomes available on its stream."""
        block.gc_base = self.searches
        entries = self.free.get(block.stream)
        if entries is None:
            entries = self.free[block.stream] = []
        insort(entries, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out; it must be in the pool with its present size and address."""
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        """An address range without memory becomes available on its stream."""
        insort(self.unmapped.setdefault(block.stream, []), (block.size, block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Take an unmapped range out."""
        entries = self.unmapped[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def age(self, block: Block) -> int:
        """How many searches a free block has seen without being taken."""
        return self.searches - block.gc_base

    def blocks(self) -> list[Block]:
        """All mapped free blocks, by stream, size and address."""
        return [entry[2] for stream in sorted(self.free) for entry in self.free[stream]]

    def spare_blocks(self) -> list[Block]:
        """Those that may be given back."""
        return [block for block in self.blocks() if block.stream not in self.kept]


def collect_garbage(pool: BlockPool, excess_bytes: int) -> Iterator[Block]:
    """Whole cached segments, those of at least average age first, until ``excess_bytes`` are found.

    A round takes *all* blocks above the average age, also when fewer would do, so that it is not needed
    soon again.
    """
    candidates = [block for block in pool.spare_blocks() if not block.is_split and block.expandable is None]
    found = 0
    while candidates and found < excess_bytes:
        average = sum(pool.age(block) for block in candidates) / len(candidates)
        old = [block for block in candidates if pool.age(block) >= average]
        candidates = [block for block in candidates if pool.age(block) < average]
        for block in old:
            found += block.size
            yield block


def oversize_to_release(
    pool: BlockPool, size: int, stream: int, max_split_bytes: int
) -> tuple[list[Block], bool]:
    """Cached blocks above max_split_size that make room for ``size`` bytes, and whether they do.

    One block that is large enough is taken alone; otherwise several, the largest first.
    """
    if max_split_bytes == UNLIMITED:
        return [], False
    needed = max(size, max_split_bytes)
    entries = pool.free.get(stream, [])
    index = bisect_left(entries, (needed, 0))
    if index < len(entries) and entries[index][2].expandable is None:
        return [entries[index][2]], True
    chosen, total = [], 0
    for block_bytes, _, block in reversed(entries[:index]):
        if total >= needed or block_bytes < max_split_bytes:
            break
        if block.expandable is None:
            chosen.append(block)
            total += block_bytes
    return chosen, total >= needed
