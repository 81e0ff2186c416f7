"""What a step did to the clock and to memory, as a list that can be done again.

    (operation, CPU time since the last one, and what it needs)

Blocks and markers stand as numbers: those from before the step first, then the step's own as it made them.
Nothing else of the program is in it: no tensors, no values, no addresses, no times. So a step that is done
again meets the allocator and the streams as they are then: it waits, merges, retries and runs out of memory
there by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdpbench.sim.model.allocator import Block, CachingAllocator
from fsdpbench.sim.model.timeline import FULL_TRAFFIC, Marker, Timeline, Work

LAUNCH, MALLOC, FREE, RECORD, WAIT, USE, HOST_WAIT, HOST_WAIT_ALL, EMPTY_CACHE, END = range(10)

Operation = tuple[int, int, Any, Any, Any]


class StepLog:
    """One step as it is recorded. `refusal`: why it cannot be done again, if so (`for_good`: nor can others).

    `before_blocks` and `before_markers`: those from before the step that it used, by their first use.
    Blocks and markers are known by identity, so that they are held here.
    """

    def __init__(self, cpu: int) -> None:
        self.operations: list[Operation] = []
        self.left = cpu
        self.refusal: str | None = None
        self.for_good = False
        self.blocks: list[Block] = []
        self.markers: list[Marker] = []
        self.before_blocks: list[Block] = []
        self.before_markers: list[Marker] = []
        self.freed: set[int] = set()
        self._block_places: dict[int, int] = {}
        self._marker_places: dict[int, int] = {}
        self._held: list[Block] = []

    def add(self, code: int, cpu: int, first: Any = 0, second: Any = 0, third: Any = 0) -> None:
        """An operation that begins when the CPU is at `cpu`."""
        self.operations.append((code, cpu - self.left, first, second, third))

    def refuse(self, why: str, *, for_good: bool = False) -> None:
        """The step depends on something that differs from time to time; ``for_good``: and so may all
        others."""
        self.refusal = self.refusal or why
        self.for_good = self.for_good or for_good

    def made_block(self, block: Block) -> None:
        """A block that this step was given."""
        self._block_places[id(block)] = len(self.blocks)
        self.blocks.append(block)

    def made_marker(self, marker: Marker) -> None:
        """A point that this step has recorded."""
        self._marker_places[id(marker)] = len(self.markers)
        self.markers.append(marker)

    def place_of(self, block: Block) -> int:
        """The step's own: 0, 1, ...; from before: -1, -2, ..."""
        place = self._block_places.get(id(block))
        if place is None:
            self.before_blocks.append(block)
            place = self._block_places[id(block)] = -len(self.before_blocks)
        return place

    def place_of_marker(self, marker: Marker) -> int:
        """As `place_of`."""
        place = self._marker_places.get(id(marker))
        if place is None:
            self.before_markers.append(marker)
            place = self._marker_places[id(marker)] = -len(self.before_markers)
        return place

    def free(self, block: Block) -> int:
        """The place of a block that is given back. The allocator may hand the same object out again."""
        place = self.place_of(block)
        self.freed.add(place)
        self._held.append(block)
        del self._block_places[id(block)]
        return place

    def survivors(self) -> Iterator[tuple[int, Block]]:
        """The step's own blocks that are still held: place and block."""
        return ((place, block) for place, block in enumerate(self.blocks) if place not in self.freed)


class RecordedTimeline(Timeline):
    """A timeline that writes what the program does to `log`, if there is one."""

    log: StepLog | None = None

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What happens inside belongs to an operation that is recorded as one."""
        log, self.log = self.log, None
        try:
            yield
        finally:
            self.log = log

    def add_stream(self) -> int:
        if self.log is not None:
            self.log.refuse("it makes a stream")
        return super().add_stream()

    def launch(
        self, stream: int, work: Work, duration_ns: int, payload: Any = None, traffic: int = FULL_TRAFFIC
    ) -> None:
        log = self.log
        if log is None:
            super().launch(stream, work, duration_ns, payload, traffic)
            return
        log.add(LAUNCH, self.cpu, stream, work, (duration_ns, traffic))
        super().launch(stream, work, duration_ns, payload, traffic)
        log.left = self.cpu

    def record(self, stream: int) -> Marker:
        marker = super().record(stream)
        log = self.log
        if log is not None:
            log.add(RECORD, self.cpu, stream)
            log.made_marker(marker)
            log.left = self.cpu
        return marker

    def make_wait(self, stream: int, marker: Marker, payload: Any = None) -> None:
        self._note_wait(stream, marker)
        super().make_wait(stream, marker, payload)

    def take_turns(self, stream: int, marker: Marker) -> None:
        self._note_wait(stream, marker)
        super().take_turns(stream, marker)

    def _note_wait(self, stream: int, marker: Marker) -> None:
        log = self.log
        if log is not None:
            log.add(WAIT, self.cpu, stream, log.place_of_marker(marker))
            log.left = self.cpu

    def has_passed(self, marker: Marker) -> bool:
        if self.log is not None:
            self.log.refuse("it asks how far the device is, and what it does may depend on that")
        return super().has_passed(marker)

    def wait_for(self, marker: Marker) -> None:
        log = self.log
        if log is not None:
            log.add(HOST_WAIT, self.cpu, log.place_of_marker(marker))
        super().wait_for(marker)
        if log is not None:
            log.left = self.cpu

    def wait_for_all(self) -> None:
        self.drain()

    def drain(self) -> None:
        log = self.log
        if log is not None:
            log.add(HOST_WAIT_ALL, self.cpu)
        super().drain()
        if log is not None:
            log.left = self.cpu


class RecordedAllocator(CachingAllocator):
    """A caching allocator that writes what is asked of it to the log of `timeline`."""

    timeline: RecordedTimeline

    def malloc(self, nbytes: int, stream: int) -> Block:
        timeline, log = self.timeline, self.timeline.log
        if log is None:
            return super().malloc(nbytes, stream)
        log.add(MALLOC, timeline.cpu, nbytes, stream)
        with timeline.unrecorded():
            block = super().malloc(nbytes, stream)
        log.made_block(block)
        log.left = timeline.cpu
        return block

    def free(self, block: Block) -> None:
        timeline, log = self.timeline, self.timeline.log
        if log is None:
            super().free(block)
            return
        log.add(FREE, timeline.cpu, log.free(block))
        with timeline.unrecorded():
            super().free(block)
        log.left = timeline.cpu

    def record_stream(self, block: Block, stream: int) -> None:
        log = self.timeline.log
        if log is not None:
            log.add(USE, self.timeline.cpu, log.place_of(block), stream)
            log.left = self.timeline.cpu
        super().record_stream(block, stream)

    def empty_cache(self) -> None:
        timeline, log = self.timeline, self.timeline.log
        if log is None:
            super().empty_cache()
            return
        log.add(EMPTY_CACHE, timeline.cpu)
        with timeline.unrecorded():
            super().empty_cache()
        log.left = timeline.cpu

    def memory_stats(self) -> dict[str, int]:
        if self.timeline.log is not None:
            self.timeline.log.refuse(
                "it reads the allocator's statistics, and what it does may depend on them"
            )
        return super().memory_stats()
