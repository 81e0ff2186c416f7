"""A snapshot of the allocator as ``torch.cuda.memory._snapshot`` returns it, for PyTorch's memory viewer.

Pickled, it opens on https://pytorch.org/memory_viz and with
``torch.cuda._memory_viz``. Simulated allocations have no stack: ``frames`` are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from fsdpbench.sim.model.allocator.caching import CachingAllocator
from fsdpbench.sim.model.allocator.conf import UNLIMITED
from fsdpbench.sim.model.allocator.types import AllocatorAction, AllocatorEvent, Block

# Ours alone; the viewer does not know it.
_NOT_TORCHS = frozenset({AllocatorAction.RETRY})


class Snapshot(TypedDict):
    """The top of a snapshot, as torch has it; a trace for each device."""

    segments: list[dict[str, object]]
    device_traces: list[list[dict[str, object]]]
    external_annotations: list[str]
    allocator_settings: dict[str, object]


def take_snapshot(allocator: CachingAllocator, events: Sequence[AllocatorEvent] = ()) -> Snapshot:
    """Return segments and blocks as they are now; `events`, collected by a listener, are the history."""
    return {
        "segments": [_segment(blocks) for blocks in _segments(allocator)],
        "device_traces": [[_entry(event) for event in events if event.action not in _NOT_TORCHS]],
        "external_annotations": [],
        "allocator_settings": _settings(allocator),
    }


def _segments(allocator: CachingAllocator) -> list[list[Block]]:
    """Return mapped blocks by segment; an expandable segment is one for each range without a gap."""
    free = [block for pool in (allocator.small_pool, allocator.large_pool) for block in pool.blocks()]
    blocks = sorted([*allocator.active_blocks.values(), *free], key=lambda block: block.address)
    segments: list[list[Block]] = []
    for block in blocks:
        if block.prev is None or not block.prev.mapped:
            segments.append([])
        segments[-1].append(block)
    return segments


def _segment(blocks: Sequence[Block]) -> dict[str, object]:
    first = blocks[0]
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.allocated),
        "active_size": sum(block.size for block in blocks if block.allocated or block.event_count),
        "requested_size": sum(block.requested for block in blocks if block.allocated or block.event_count),
        "stream": first.stream,
        "segment_type": "small" if first.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": first.expandable is not None,
        "frames": [],
        "blocks": [_block(block) for block in blocks],
    }


def _block(block: Block) -> dict[str, object]:
    state = (
        "active_allocated" if block.allocated else "active_pending_free" if block.event_count else "inactive"
    )
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested if state != "inactive" else 0,
        "state": state,
        "frames": [],
    }


def _entry(event: AllocatorEvent) -> dict[str, object]:
    return {
        "action": event.action.value,
        "device_free" if event.action is AllocatorAction.OOM else "addr": event.address,
        "size": event.size,
        "stream": event.stream,
        "time_us": event.time_ns // 1000,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": [],
    }


def _settings(allocator: CachingAllocator) -> dict[str, object]:
    conf = allocator.conf
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1 if conf.max_split_bytes == UNLIMITED else conf.max_split_bytes,
        "garbage_collection_threshold": conf.garbage_collection_threshold,
        "expandable_segments": conf.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << index): divisions for index, divisions in enumerate(conf.roundup_power2_divisions)
        },
    }
