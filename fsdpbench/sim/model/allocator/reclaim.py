"""Which cached blocks to give back: garbage collection by age, and blocks too large to be split."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from fsdpbench.sim.model.allocator.conf import UNLIMITED
from fsdpbench.sim.model.allocator.expandable import BlockPool
from fsdpbench.sim.model.allocator.types import Block


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
