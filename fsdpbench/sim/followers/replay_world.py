"""Names for what lives longer than a step: one step's log then fits the blocks and markers of another time.

A block or marker is called by the *structure* of the step that made it (its operations without sizes and
times), by how many steps of that structure ago that was, and by its place among what that step made:

    (structure 4, 1, 17)      the 18th block that the last step of structure 4 was given
    (BEFORE, 0, 3)            was there when the soak began

Two moments are alike for a program where the same names are alive and the last step had the same structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from fsdpbench.sim.model.allocator import Block, CachingAllocator
from fsdpbench.sim.model.timeline import Marker, Timeline

BEFORE = -1
_KEPT_STEPS = 2
"""Steps of each structure whose markers are kept; nothing waits for older ones."""


class Name(NamedTuple):
    """Name of a block or marker; `ago` counts steps of its structure, 1 is the last one."""

    structure: int
    ago: int
    place: int


class Moment(NamedTuple):
    """State of the program between two steps: the structure of the last one, and the live names."""

    structure: int
    alive: int


class UnnamedError(LookupError):
    """A block or marker from too long ago, or not made here."""


class World:
    """The live blocks and the markers that may be waited for, by name."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.counts: dict[int, int] = {BEFORE: 0}
        self.last = BEFORE
        self._blocks: dict[tuple[int, int, int], Block] = {}
        self._names: dict[int, tuple[int, int, int]] = {}
        self._markers: dict[tuple[int, int], list[Marker]] = {}
        self._marker_names: dict[int, tuple[int, int, int]] = {}
        for place, block in enumerate(sorted(blocks, key=lambda each: each.address)):
            self.born(block, BEFORE, 0, place)

    def born(self, block: Block, structure: int, count: int, place: int) -> None:
        """Add a block that outlives its step, the `count`-th of that structure."""
        name = (structure, count, place)
        self._blocks[name], self._names[id(block)] = block, name

    def died(self, block: Block) -> None:
        """Remove a block from before the present step."""
        del self._blocks[self._names.pop(id(block))]

    def step_ended(self, structure: int, markers: list[Marker]) -> int:
        """Add the markers of a step of that structure; return how many of these steps there have been."""
        count = self.counts[structure] = self.counts.get(structure, 0) + 1
        self.last = structure
        self._markers[structure, count] = markers
        for place, marker in enumerate(markers):
            self._marker_names[id(marker)] = (structure, count, place)
        for marker in self._markers.pop((structure, count - _KEPT_STEPS), ()):
            del self._marker_names[id(marker)]
        return count

    def name(self, block: Block) -> Name:
        """Return a block's name. Raises `UnnamedError`."""
        return self._relative(self._names.get(id(block)))

    def marker_name(self, marker: Marker) -> Name:
        """Return a marker's name. Raises `UnnamedError` for an old marker, or one from before the soak."""
        return self._relative(self._marker_names.get(id(marker)))

    def _relative(self, name: tuple[int, int, int] | None) -> Name:
        if name is None:
            raise UnnamedError
        structure, count, place = name
        return Name(structure, self.counts[structure] - count + 1 if structure != BEFORE else 0, place)

    def block(self, name: Name) -> Block:
        """Return the block with this name. Raises `KeyError`."""
        return self._blocks[self._absolute(name)]

    def marker(self, name: Name) -> Marker:
        """Return the marker with this name. Raises `KeyError`."""
        structure, count, place = self._absolute(name)
        return self._markers[structure, count][place]

    def _absolute(self, name: Name) -> tuple[int, int, int]:
        count = 0 if name.structure == BEFORE else self.counts[name.structure] - name.ago + 1
        return name.structure, count, name.place

    def moment(self) -> Moment:
        """Return the program's present state."""
        return Moment(self.last, hash(frozenset(map(self._relative, self._blocks))))

    def alive(self) -> list[Block]:
        """Return all live blocks."""
        return list(self._blocks.values())

    def kept_markers(self) -> dict[tuple[int, int], list[Marker]]:
        """Return markers by structure and how many steps ago (1: the last of that structure)."""
        return {
            (structure, self.counts[structure] - count + 1): markers
            for (structure, count), markers in self._markers.items()
        }

    def replace_markers(self, structure: int, ago: int, markers: list[Marker]) -> None:
        """Replace markers by the program's own of the same points."""
        count = self.counts[structure] - ago + 1
        for place, (old, new) in enumerate(zip(self._markers[structure, count], markers, strict=True)):
            self._marker_names.pop(id(old), None)
            new.time = old.time
            self._marker_names[id(new)] = (structure, count, place)
        self._markers[structure, count] = markers


_SIZED = {LAUNCH, MALLOC}


@dataclass(frozen=True)
class RecordedStep:
    """A step's effects on clock and memory, equal if every size and time is.

    `operations` number the step's own blocks and markers from 0, those from before by -1, -2, ... into
    `blocks_before` and `markers_before`. `structure`: its shape without sizes and times.
    """

    operations: tuple[Operation, ...]
    blocks_before: tuple[Name, ...]
    markers_before: tuple[Name, ...]
    survivors: tuple[int, ...]
    structure: int
    after: Moment


def structure_of(log: StepLog) -> tuple[Any, ...]:
    """Return a step's shape: equal for steps whose own blocks and markers correspond by number."""
    shape = tuple(
        (code, second) if code in _SIZED else (code, first, second)
        for code, _, first, second, _ in log.operations
    )
    return shape, tuple(place for place, _ in log.survivors())


def do_again(step: RecordedStep, world: World, timeline: Timeline, allocator: CachingAllocator) -> None:
    """Apply the step's effects to clock, streams and allocator.

    Raises `SimOutOfMemoryError` as the step itself would.
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
    """Apply one operation, the most frequent kinds first.

    Blocks and markers from before the step come first; numbers count from the step's own.
    """
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
