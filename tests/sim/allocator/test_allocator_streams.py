"""Memory used on several streams: events, active bytes, and what the CPU waits for."""

from __future__ import annotations

from fsdpbench.sim.model.allocator import AllocatorCosts, CachingAllocator

MIB, GIB = 1 << 20, 1 << 30
SIDE = 3


def test_a_recorded_block_stays_active_until_its_stream_has_passed(clock):
    allocator = CachingAllocator(GIB, clock)
    block = allocator.malloc(30 * MIB, 0)
    clock.queue(SIDE, 5_000_000)
    allocator.record_stream(block, SIDE)
    allocator.free(block)
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == 30 * MIB

    early = allocator.malloc(30 * MIB, 0)
    assert early.address != block.address
    clock.advance_cpu(6_000_000)
    late = allocator.malloc(30 * MIB, 0)
    assert late.address == block.address
    assert allocator.memory_stats()["active_bytes.all.current"] == 60 * MIB


def test_a_block_waits_for_every_stream_that_used_it(clock):
    allocator = CachingAllocator(GIB, clock)
    block = allocator.malloc(30 * MIB, 0)
    for stream, ns in ((1, 1_000_000), (2, 9_000_000)):
        clock.queue(stream, ns)
        allocator.record_stream(block, stream)
    allocator.free(block)
    clock.wait_cpu_until(2_000_000)
    assert allocator.malloc(30 * MIB, 0).address != block.address
    clock.wait_cpu_until(10_000_000)
    assert allocator.malloc(30 * MIB, 0).address == block.address


def test_events_of_one_stream_pass_in_order_but_streams_do_not_block_each_other(clock):
    allocator = CachingAllocator(GIB, clock)
    slow, quick = allocator.malloc(30 * MIB, 0), allocator.malloc(40 * MIB, 0)
    clock.queue(1, 50_000_000)
    allocator.record_stream(slow, 1)
    allocator.free(slow)
    clock.queue(2, 1_000_000)
    allocator.record_stream(quick, 2)
    allocator.free(quick)
    clock.wait_cpu_until(2_000_000)
    assert allocator.malloc(40 * MIB, 0).address == quick.address


def test_recording_the_own_stream_changes_nothing(clock):
    allocator = CachingAllocator(GIB, clock)
    block = allocator.malloc(30 * MIB, 4)
    clock.queue(4, 10_000_000)
    allocator.record_stream(block, 4)
    allocator.free(block)
    assert allocator.malloc(30 * MIB, 4).address == block.address


def test_a_new_owner_does_not_inherit_uses(clock):
    allocator = CachingAllocator(GIB, clock)
    block = allocator.malloc(30 * MIB, 0)
    allocator.record_stream(block, SIDE)
    allocator.free(block)
    clock.advance_cpu(1_000_000)
    again = allocator.malloc(30 * MIB, 0)
    clock.queue(SIDE, 10**9)
    allocator.free(again)
    assert allocator.malloc(30 * MIB, 0).address == block.address


def test_reuse_on_the_own_stream_needs_no_wait(clock):
    allocator = CachingAllocator(GIB, clock)
    block = allocator.malloc(30 * MIB, 0)
    before = clock.now
    clock.queue(0, 10**9)
    allocator.free(block)
    assert allocator.malloc(30 * MIB, 0).address == block.address
    assert clock.now == before


def test_driver_calls_and_events_take_host_time(clock):
    costs = AllocatorCosts(malloc_ns=1000, malloc_ns_per_gib=0, free_ns=500, free_ns_per_gib=0, event_ns=7)
    allocator = CachingAllocator(GIB, clock, costs=costs)
    block = allocator.malloc(30 * MIB, 0)
    assert clock.now == 1000
    clock.queue(SIDE, 10**6)
    allocator.record_stream(block, SIDE)
    allocator.free(block)
    assert clock.now == 1007
    allocator.malloc(100, 0)  # one query, and a small segment
    assert clock.now == 2014


def test_empty_cache_waits_for_events_and_the_device(clock):
    allocator = CachingAllocator(GIB, clock)
    block = allocator.malloc(30 * MIB, 0)
    clock.queue(SIDE, 7_000_000)
    allocator.record_stream(block, SIDE)
    allocator.free(block)
    allocator.empty_cache()
    assert clock.now >= 7_000_000
    assert clock.device_synchronisations == 1
    assert allocator.memory_stats()["reserved_bytes.all.current"] == 0
