"""Size classes, splitting, merging and reuse of blocks."""

from __future__ import annotations

import itertools

import pytest

from fsdpbench.sim.model.allocator import AllocatorConf, CachingAllocator

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def reserved(allocator: CachingAllocator) -> int:
    return allocator.memory_stats()["reserved_bytes.all.current"]


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(clock, request_bytes, block, segment):
    allocator = CachingAllocator(GIB, clock)
    got = allocator.malloc(request_bytes, 0)
    # A rest of at most 1 MiB is not split off a large block.
    assert got.size == block
    assert got.requested == request_bytes
    assert reserved(allocator) == segment


def test_small_blocks_share_a_segment_and_merge_when_freed(clock):
    allocator = CachingAllocator(GIB, clock)
    blocks = [allocator.malloc(256 * KIB, 0) for _ in range(8)]
    assert reserved(allocator) == 2 * MIB
    assert [b.address - a.address for a, b in itertools.pairwise(blocks)] == [256 * KIB] * 7
    for index in (1, 3, 5, 7, 0, 2, 4, 6):
        allocator.free(blocks[index])
    assert allocator.memory_stats()["inactive_split.all.current"] == 0
    whole = allocator.malloc(1 * MIB, 0)
    assert whole.address == blocks[0].address
    assert reserved(allocator) == 2 * MIB


def test_best_fit_takes_the_smallest_then_lowest(clock):
    allocator = CachingAllocator(GIB, clock)
    sizes = [40 * MIB, 30 * MIB, 30 * MIB, 50 * MIB]
    blocks = [allocator.malloc(size, 0) for size in sizes]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(28 * MIB, 0).address == addresses[1]
    assert allocator.malloc(29 * MIB, 0).address == addresses[2]
    assert allocator.malloc(45 * MIB, 0).address == addresses[3]


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left(clock):
    allocator = CachingAllocator(GIB, clock)
    allocator.free(allocator.malloc(30 * MIB, 0))
    kept_whole = allocator.malloc(29 * MIB, 0)
    assert kept_whole.size == 30 * MIB
    allocator.free(kept_whole)
    cut = allocator.malloc(29 * MIB - 512, 0)
    assert cut.size == 29 * MIB - 512
    assert allocator.memory_stats()["inactive_split_bytes.all.current"] == 1 * MIB + 512


def test_streams_do_not_share_cached_blocks(clock):
    allocator = CachingAllocator(GIB, clock)
    first = allocator.malloc(30 * MIB, 0)
    allocator.free(first)
    other = allocator.malloc(30 * MIB, 5)
    assert other.address != first.address
    assert allocator.malloc(30 * MIB, 0).address == first.address


def test_blocks_above_max_split_size_stay_whole(clock):
    conf = AllocatorConf.parse("max_split_size_mb:64")
    allocator = CachingAllocator(GIB, clock, conf)
    large = allocator.malloc(100 * MIB, 0)
    allocator.free(large)
    # Neither a small request nor one that would waste more than 20 MiB may have it.
    assert allocator.malloc(32 * MIB, 0).address != large.address
    assert allocator.malloc(70 * MIB, 0).address != large.address
    fitting = allocator.malloc(90 * MIB, 0)
    assert (fitting.address, fitting.size) == (large.address, 100 * MIB)
    assert allocator.memory_stats()["oversize_allocations.current"] == 2


def test_roundup_power2_divisions(clock):
    four = AllocatorConf.parse("roundup_power2_divisions:4")
    allocator = CachingAllocator(8 * GIB, clock, four)
    assert allocator.malloc(1200 * MIB, 0).size == 1280 * MIB
    assert allocator.malloc(1280 * MIB, 0).size == 1280 * MIB
    assert allocator.malloc(1024 * MIB, 0).size == 1024 * MIB
    by_size = AllocatorConf.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    allocator = CachingAllocator(32 * GIB, clock, by_size)
    assert allocator.malloc(100 * MIB, 0).size == 100 * MIB
    assert allocator.malloc(600 * MIB, 0).size == 768 * MIB
    assert allocator.malloc(1100 * MIB, 0).size == 1280 * MIB
    assert allocator.malloc(4100 * MIB, 0).size == 4608 * MIB


def test_freeing_twice_is_refused(clock):
    allocator = CachingAllocator(GIB, clock)
    block = allocator.malloc(100, 0)
    allocator.free(block)
    with pytest.raises(ValueError, match="was not allocated"):
        allocator.free(block)


def test_a_negative_size_is_refused(clock):
    with pytest.raises(ValueError, match="-1 bytes"):
        CachingAllocator(GIB, clock).malloc(-1, 0)
