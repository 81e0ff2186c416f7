"""Blocks and their pools: size rounding, splitting, merging, and the choice of cached blocks to release."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from fsdpbench.sim.model.allocator.conf import POWER2_INTERVALS, UNLIMITED, AllocatorConf
from fsdpbench.sim.model.allocator.types import Block

MIB = 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE_ALLOCATION = 10 * MIB
ROUND_LARGE = 2 * MIB
_MIB_BITS = 20


def block_size(nbytes: int, conf: AllocatorConf) -> int:
    """Return the block size for a request of `nbytes`: a multiple of 512, or a fraction of a power of two."""
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    table = conf.roundup_power2_divisions
    if table:
        divisions = table[min(max(nbytes.bit_length() - 1 - _MIB_BITS, 0), POWER2_INTERVALS - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return _next_division(nbytes, divisions)
    return (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK


def _next_division(nbytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between two powers of two."""
    floor = 1 << (nbytes.bit_length() - 1)
    if nbytes == floor:
        return nbytes
    step = floor // divisions
    return 2 * floor if step == 0 else -(-nbytes // step) * step


def segment_size(size: int) -> int:
    """Return the bytes to request from the driver for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def split_front(block: Block, size: int, pool: "BlockPool") -> Block:
    """Cut the first `size` bytes off `block` and return them as a new block; `block` keeps the rest.

    The caller puts the rest into a pool, because the caller knows whether the rest is mapped.
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


def split_back(block: Block, size: int, pool: "BlockPool") -> Block:
    """Cut off everything after the first `size` bytes of `block` and return it as a new block."""
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


def merge(block: Block, neighbour: Block | None, pool: "BlockPool") -> int:
    """Merge a free neighbour into `block` (in no pool); return the bytes gained, or 0 if not merged.

    A free neighbour is unused, has no outstanding event, and is mapped if and only if `block` is.
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


# (size in bytes, address, block): addresses differ, so blocks themselves are never compared.
FreeEntry = tuple[int, int, Block]


class BlockPool:
    """The small or the large pool: mapped free blocks, and unmapped parts of expandable segments.

    Blocks are sorted by (size, address) in one list per stream. Torch's set, ordered by (stream, size,
    address), has the same order within a stream.
    """

    __slots__ = ("free", "is_small", "kept", "searches", "unmapped")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.free: dict[int, list[FreeEntry]] = {}
        self.unmapped: dict[int, list[FreeEntry]] = {}
        # Streams whose free blocks are never released, because a captured graph will reuse their addresses.
        self.kept: set[int] = set()
        # Clock of garbage collection: a block's age is the number of searches since its insertion.
        self.searches = 0

    def insert(self, block: Block) -> None:
        """Make a mapped block available on its stream."""
        block.gc_base = self.searches
        entries = self.free.get(block.stream)
        if entries is None:
            entries = self.free[block.stream] = []
        insort(entries, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block, which must be in the pool with its current size and address."""
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        """Make an address range without memory available on its stream."""
        insort(self.unmapped.setdefault(block.stream, []), (block.size, block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Remove an unmapped range."""
        entries = self.unmapped[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def age(self, block: Block) -> int:
        """Return the number of searches since the free block was inserted."""
        return self.searches - block.gc_base

    def blocks(self) -> list[Block]:
        """Return all mapped free blocks, ordered by stream, size and address."""
        return [entry[2] for stream in sorted(self.free) for entry in self.free[stream]]

    def spare_blocks(self) -> list[Block]:
        """Return the free blocks that may be released."""
        return [block for block in self.blocks() if block.stream not in self.kept]


def collect_garbage(pool: "BlockPool", excess_bytes: int) -> Iterator[Block]:
    """Yield whole cached segments, the oldest first, until they contain `excess_bytes`.

    Like torch, each round takes *all* blocks of at least average age, so the next collection comes later.
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
    pool: "BlockPool", size: int, stream: int, max_split_bytes: int
) -> tuple[list[Block], bool]:
    """Return cached blocks above `max_split_bytes` that make room for `size` bytes, and whether they suffice.

    If one block is large enough, it is chosen alone; otherwise several, the largest first.
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
