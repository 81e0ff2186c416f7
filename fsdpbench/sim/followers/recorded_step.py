"""A step that was recorded, in names; and doing it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.sim.followers.replay_log import (
    EMPTY_CACHE,
    FREE,
    HOST_WAIT,
    HOST_WAIT_ALL,
    LAUNCH,
    MALLOC,
    RECORD,
    USE,
    WAIT,
    Operation,
    StepLog,
)
from fsdpbench.sim.followers.replay_world import Moment, Name, World
from fsdpbench.sim.model.allocator import Block, CachingAllocator
from fsdpbench.sim.model.timeline import Marker, Timeline

_SIZED = {LAUNCH, MALLOC}


@dataclass(frozen=True)
class RecordedStep:
    """Two are equal if they do the same to the clock and to memory, in every size and time.

    ``operations`` name the step's own blocks and markers by place from 0, those from before by -1, -2, ...
    into ``blocks_before`` and ``markers_before``. ``structure``: its shape without sizes and times.
    """

    operations: tuple[Operation, ...]
    blocks_before: tuple[Name, ...]
    markers_before: tuple[Name, ...]
    survivors: tuple[int, ...]
    structure: int
    after: Moment


def structure_of(log: StepLog) -> tuple[Any, ...]:
    """What two steps have in common whose own blocks and markers stand for each other, place by place."""
    shape = tuple(
        (code, second) if code in _SIZED else (code, first, second)
        for code, _, first, second, _ in log.operations
    )
    return shape, tuple(place for place, _ in log.survivors())


def do_again(step: RecordedStep, world: World, timeline: Timeline, allocator: CachingAllocator) -> None:
    """Let clock, streams and allocator meet what the step did to them.

    Raises SimOutOfMemoryError as the step itself would.
    """
    blocks = [world.block(name) for name in reversed(step.blocks_before)]
    markers = [world.marker(name) for name in reversed(step.markers_before)]
    outside_blocks, outside_markers = len(blocks), len(markers)
    _carry_out(step.operations, timeline, allocator, blocks, markers, world)
    count = world.step_ended(step.structure, markers[outside_markers:])
    for place in step.survivors:
        world.born(blocks[outside_blocks + place], step.structure, count, place)


def _carry_out(
    operations: Sequence[Operation],
    timeline: Timeline,
    allocator: CachingAllocator,
    blocks: list[Block],
    markers: list[Marker],
    world: World,
) -> None:
    """The most frequent operations come first. Blocks and markers from before the step are there already;
    places count from the first of the step's own."""
    own_blocks, own_markers = len(blocks), len(markers)
    launch, record, make_wait = timeline.launch, timeline.record, timeline.make_wait
    malloc, free = allocator.malloc, allocator.free
    for code, delta, first, second, third in operations:
        timeline.cpu += delta
        if code == LAUNCH:
            duration_ns, traffic = third
            launch(first, second, duration_ns, None, traffic)
        elif code == MALLOC:
            blocks.append(malloc(first, second))
        elif code == FREE:
            block = blocks[own_blocks + first]
            if first < 0:
                world.died(block)
            free(block)
        elif code == RECORD:
            markers.append(record(first))
        elif code == WAIT:
            make_wait(first, markers[own_markers + second])
        elif code == USE:
            allocator.record_stream(blocks[own_blocks + first], second)
        elif code == HOST_WAIT:
            timeline.wait_for(markers[own_markers + first])
        elif code == HOST_WAIT_ALL:
            timeline.wait_for_all()
        elif code == EMPTY_CACHE:
            allocator.empty_cache()
