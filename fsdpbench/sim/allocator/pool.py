"""Free blocks, kept sorted by size and address, a list for each stream.

Torch keeps one ordered set for all streams, ordered by (stream, size, address), and looks only at one
stream's part of it; a list a stream is the same order with shorter searches.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from fsdpbench.sim.allocator.types import Block

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
