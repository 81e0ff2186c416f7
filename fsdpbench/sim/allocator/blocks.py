"""Splitting and merging of neighbouring blocks in a segment."""

from __future__ import annotations

from fsdpbench.sim.allocator.pool import BlockPool
from fsdpbench.sim.allocator.types import Block


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
