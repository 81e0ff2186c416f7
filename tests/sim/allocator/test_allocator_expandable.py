"""Expandable segments grow a free block instead of asking for a new segment."""

from __future__ import annotations

import pytest

from fsdpbench.sim.model.allocator import (
    AllocatorAction,
    AllocatorConf,
    AllocatorEvent,
    CachingAllocator,
    SimOutOfMemoryError,
)

MIB, GIB = 1 << 20, 1 << 30
CONF = AllocatorConf.parse("expandable_segments:True")


def test_a_growing_request_reuses_what_is_cached(clock):
    fixed, growing = CachingAllocator(GIB, clock), CachingAllocator(GIB, clock, CONF)
    for allocator, expected in ((fixed, 600 + 620), (growing, 620)):
        allocator.free(allocator.malloc(600 * MIB, 0))
        allocator.malloc(620 * MIB, 0)
        # Pages are of 20 MiB, so 620 are 31 of them.
        assert allocator.memory_stats()["reserved_bytes.all.peak"] // MIB == min(expected, 1024) or (
            allocator.memory_stats()["num_alloc_retries"] == 1
        )
    assert growing.memory_stats()["reserved_bytes.all.current"] == 620 * MIB
    assert growing.memory_stats()["num_alloc_retries"] == 0


def test_it_fits_where_fragments_would_not(clock):
    def fill(allocator: CachingAllocator) -> None:
        blocks = [allocator.malloc(100 * MIB, 0) for _ in range(8)]
        for block in blocks[::2]:
            allocator.free(block)
        for _ in range(4):
            allocator.malloc(60 * MIB, 0)
        for block in blocks[1::2]:
            allocator.free(block)
        allocator.malloc(700 * MIB, 0)

    fill(CachingAllocator(GIB, clock, CONF))
    with pytest.raises(SimOutOfMemoryError):
        fill(CachingAllocator(GIB, clock))


def test_small_and_large_pages(clock):
    allocator = CachingAllocator(GIB, clock, CONF)
    allocator.malloc(100, 0)
    allocator.malloc(3 * MIB, 0)
    stats = allocator.memory_stats()
    assert stats["reserved_bytes.small_pool.current"] == 2 * MIB
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB
    assert stats["segment.all.current"] == 0


def test_empty_cache_unmaps_whole_pages_only(clock):
    events: list[AllocatorEvent] = []
    allocator = CachingAllocator(GIB, clock, CONF, events.append)
    first, second = allocator.malloc(30 * MIB, 0), allocator.malloc(50 * MIB, 0)
    allocator.free(second)
    allocator.empty_cache()
    # 80 MiB were mapped; the block of 30 MiB keeps two pages of 20.
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 40 * MIB
    assert sum(event.size for event in events if event.action is AllocatorAction.SEGMENT_UNMAP) == 40 * MIB
    again = allocator.malloc(50 * MIB, 0)
    assert again.address == first.address + 30 * MIB


def test_streams_have_their_own_segments(clock):
    allocator = CachingAllocator(GIB, clock, CONF)
    a, b = allocator.malloc(30 * MIB, 0), allocator.malloc(30 * MIB, 1)
    assert abs(a.address - b.address) > GIB
    allocator.free(a)
    assert allocator.malloc(30 * MIB, 1).address == b.address + 30 * MIB
