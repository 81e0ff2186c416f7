"""PyTorch's own memory viewer reads the allocator's snapshot."""

from __future__ import annotations

import pickle

import pytest

from fsdpbench.sim.followers.memory_history import take_snapshot
from fsdpbench.sim.model.allocator import (
    AllocatorConf,
    AllocatorEvent,
    CachingAllocator,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(params=["", "expandable_segments:True"])
def used(request, clock) -> tuple[CachingAllocator, list[AllocatorEvent]]:
    events: list[AllocatorEvent] = []
    allocator = CachingAllocator(GIB, clock, AllocatorConf.parse(request.param), events.append)
    held = [allocator.malloc(size, 0) for size in (100, 700, 3 * MIB, 30 * MIB, 61 * MIB)]
    clock.queue(4, 10**9)
    allocator.record_stream(held[3], 4)
    allocator.free(held[3])
    allocator.free(held[0])
    allocator.malloc(5 * MIB, 4)
    return allocator, events


def test_segments_add_up_to_the_statistics(used):
    allocator, events = used
    stats = allocator.memory_stats()
    segments = take_snapshot(allocator, events)["segments"]
    for key, counter in (
        ("total_size", "reserved"),
        ("allocated_size", "allocated"),
        ("active_size", "active"),
    ):
        assert sum(segment[key] for segment in segments) == stats[f"{counter}_bytes.all.current"]
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    states = {block["state"] for segment in segments for block in segment["blocks"]}
    assert states == {"active_allocated", "active_pending_free", "inactive"}


def test_torchs_viewer_reads_it(used):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(pickle.dumps(take_snapshot(*used)))
    assert "MiB" in viewer.segsum(snapshot)
    assert "TOTAL MEM" in viewer.trace(snapshot)
    assert "<script" in viewer.trace_plot(snapshot)
