"""Pressure: alloc retries, out of memory, garbage collection and release of large blocks."""

from __future__ import annotations

import pytest

from fsdpbench.sim.model.allocator import AllocatorConf, CachingAllocator, SimOutOfMemoryError
from fsdpbench.sim.model.allocator.types import AllocatorAction, AllocatorEvent

MIB, GIB = 1 << 20, 1 << 30


def test_a_retry_gives_the_cache_back_and_is_counted(clock):
    events: list[AllocatorEvent] = []
    allocator = CachingAllocator(100 * MIB, clock, listener=events.append)
    allocator.free(allocator.malloc(60 * MIB, 0))
    got = allocator.malloc(80 * MIB, 0)
    stats = allocator.memory_stats()
    assert got.size == 80 * MIB
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 0)
    assert stats["reserved_bytes.all.current"] == 80 * MIB
    retry = next(event for event in events if event.action is AllocatorAction.RETRY)
    assert (retry.size, retry.freed) == (80 * MIB, 60 * MIB)
    assert clock.device_synchronisations == 1


def test_a_retry_waits_for_blocks_that_other_streams_still_use(clock):
    allocator = CachingAllocator(100 * MIB, clock)
    block = allocator.malloc(60 * MIB, 0)
    clock.queue(1, 30_000_000)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.malloc(80 * MIB, 0)
    assert clock.now >= 30_000_000
    assert allocator.memory_stats()["num_alloc_retries"] == 1


def test_split_segments_cannot_be_given_back(clock):
    allocator = CachingAllocator(100 * MIB, clock)
    whole = allocator.malloc(60 * MIB, 0)
    allocator.free(whole)
    keep = allocator.malloc(30 * MIB, 0)
    with pytest.raises(SimOutOfMemoryError):
        allocator.malloc(80 * MIB, 0)
    stats = allocator.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 1)
    assert stats["inactive_split_bytes.all.current"] == 30 * MIB
    allocator.free(keep)
    assert allocator.malloc(80 * MIB, 0).size == 80 * MIB


def test_out_of_memory_says_what_torch_says(clock):
    allocator = CachingAllocator(10 * GIB, clock, total_bytes=11 * GIB)
    allocator.malloc(6 * GIB, 0)
    allocator.free(allocator.malloc(1 * GIB, 0))
    with pytest.raises(SimOutOfMemoryError) as caught:
        allocator.malloc(5 * GIB, 0)
    message = str(caught.value)
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 11.00 GiB of which "
        "4.00 GiB is free."
    )
    assert "this process has 7.00 GiB memory in use" in message
    assert "Of the allocated memory 6.00 GiB is allocated by PyTorch" in message
    assert "0 bytes is reserved by PyTorch but unallocated" in message


def test_after_out_of_memory_the_allocator_still_works(clock):
    allocator = CachingAllocator(100 * MIB, clock)
    with pytest.raises(SimOutOfMemoryError):
        allocator.malloc(200 * MIB, 0)
    assert allocator.malloc(90 * MIB, 0).size == 90 * MIB


def test_large_cached_blocks_are_released_before_a_retry(clock):
    conf = AllocatorConf.parse("max_split_size_mb:40")
    allocator = CachingAllocator(200 * MIB, clock, conf)
    cached = [allocator.malloc(60 * MIB, 0) for _ in range(2)]
    small = allocator.malloc(30 * MIB, 0)
    for block in (*cached, small):
        allocator.free(block)
    allocator.malloc(100 * MIB, 0)
    stats = allocator.memory_stats()
    assert stats["num_alloc_retries"] == 0
    # Both large ones are gone, the small cached one is still there.
    assert stats["reserved_bytes.all.current"] == 130 * MIB


@pytest.mark.parametrize(("settings", "collects"), [(",per_process_memory_fraction:1.0", True), ("", False)])
def test_garbage_collection_frees_the_oldest_and_needs_a_fraction(clock, settings, collects):
    conf = AllocatorConf.parse("garbage_collection_threshold:0.7" + settings)
    allocator = CachingAllocator(200 * MIB, clock, conf)
    old, young = allocator.malloc(60 * MIB, 0), allocator.malloc(50 * MIB, 0)
    allocator.free(old)
    allocator.malloc(20 * MIB, 2)
    allocator.free(young)
    allocator.malloc(30 * MIB, 1)
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 160 * MIB
    allocator.malloc(20 * MIB, 1)  # 160 of 200 MiB are above the threshold of 140
    assert allocator.memory_stats()["reserved_bytes.all.current"] == (120 if collects else 180) * MIB
    assert allocator.memory_stats()["num_alloc_retries"] == 0
    assert allocator.malloc(50 * MIB, 0).address == young.address


def test_a_memory_fraction_bounds_what_is_reserved(clock):
    conf = AllocatorConf.parse("per_process_memory_fraction:0.5")
    allocator = CachingAllocator(100 * MIB, clock, conf)
    allocator.malloc(40 * MIB, 0)
    with pytest.raises(SimOutOfMemoryError):
        allocator.malloc(20 * MIB, 0)


def test_refused_driver_calls_do_not_wait_for_the_device(clock):
    allocator = CachingAllocator(100 * MIB, clock)
    clock.queue(0, 10**9)
    with pytest.raises(SimOutOfMemoryError):
        allocator.malloc(200 * MIB, 0)
    assert clock.device_synchronisations == 0


def test_driver_calls_are_told_with_their_times(clock):
    calls: list[tuple[str, int, int]] = []
    allocator = CachingAllocator(100 * MIB, clock)
    allocator.device.call_listener = lambda *call: calls.append(call)
    block = allocator.malloc(60 * MIB, 0)
    clock.queue(1, 30_000_000)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.malloc(80 * MIB, 0)
    assert [name for name, _, _ in calls] == [
        "cudaMalloc",
        "cudaMalloc",
        "cudaEventSynchronize",
        "cudaFree",
        "cudaMalloc",
    ]
    assert calls[2][2] >= 30_000_000
    assert all(start <= end for _, start, end in calls)
    assert [start for _, start, _ in calls[2:]] == [end for _, _, end in calls[1:-1]]


def test_pages_are_mapped_and_unmapped_by_calls_of_their_own(clock):
    calls: list[str] = []
    conf = AllocatorConf(expandable_segments=True)
    allocator = CachingAllocator(100 * MIB, clock, conf)
    allocator.device.call_listener = lambda name, start, end: calls.append(name)
    allocator.free(allocator.malloc(60 * MIB, 0))
    allocator.empty_cache()
    assert calls == ["cuMemCreate", "cuMemUnmap"]
