"""A step's operations on clock and memory, as a list that can be repeated.

    (operation, CPU time since the last one, its arguments)

Blocks and markers are numbered: those from before the step first, then the step's own in order. The list
holds nothing else of the program: no tensors, values, addresses or times. So a repeated step meets the
present allocator and streams: it waits, merges, retries and runs out of memory by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from fsdpbench.sim.model.allocator import Block
from fsdpbench.sim.model.observed import Observer
from fsdpbench.sim.model.timeline import Marker, Timeline, Work

LAUNCH, MALLOC, FREE, RECORD, WAIT, USE, HOST_WAIT, HOST_WAIT_ALL, EMPTY_CACHE, END = range(10)

Operation = tuple[int, int, Any, Any, Any]
Thing = TypeVar("Thing")


class Places(Generic[Thing]):
    """Numbers of blocks or markers, known by identity: the step's own 0, 1, ...; from before -1, -2, ..."""

    def __init__(self) -> None:
        self.own: list[Thing] = []
        self.before: list[Thing] = []
        self._places: dict[int, int] = {}

    def made(self, thing: Thing) -> None:
        """Number an object that the step received."""
        self._places[id(thing)] = len(self.own)
        self.own.append(thing)

    def of(self, thing: Thing) -> int:
        """Return the number of an object; unknown ones are from before the step."""
        place = self._places.get(id(thing))
        if place is None:
            self.before.append(thing)
            place = self._places[id(thing)] = -len(self.before)
        return place

    def pop(self, thing: Thing) -> int:
        """Return and remove the number of an object, which may come again as another."""
        place = self.of(thing)
        del self._places[id(thing)]
        return place


class StepLog(Observer):
    """Record of one step. `refusal`: why it cannot be repeated, if so (`for_good`: nor can others).

    Blocks and markers are known by identity, so that they are held here.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.operations: list[Operation] = []
        self.refusal: str | None = None
        self.for_good = False
        self.blocks: Places[Block] = Places()
        self.markers: Places[Marker] = Places()
        self.freed: set[int] = set()
        self._timeline = timeline
        self._left = timeline.cpu
        self._held: list[Block] = []

    def add(self, code: int, first: Any = 0, second: Any = 0, third: Any = 0) -> None:
        """Append operation `code`, which begins now, with its arguments."""
        now = self._timeline.cpu
        self.operations.append((code, now - self._left, first, second, third))
        self._left = now

    def refuse(self, why: str, *, for_good: bool = False) -> None:
        """Mark the step as dependent on varying conditions; `for_good`: as are all others."""
        self.refusal = self.refusal or why
        self.for_good = self.for_good or for_good

    def survivors(self) -> Iterator[tuple[int, Block]]:
        """Yield number and block of the step's own blocks that are still held."""
        return ((place, block) for place, block in enumerate(self.blocks.own) if place not in self.freed)

    def returned(self) -> None:
        self._left = self._timeline.cpu

    def stream_made(self, stream: int) -> None:
        self.refuse("it makes a stream")

    def launches(self, stream: int, work: Work, duration_ns: int, traffic: int) -> None:
        """Append a launch of `duration_ns`."""
        self.add(LAUNCH, stream, work, (duration_ns, traffic))

    def recorded(self, stream: int, marker: Marker) -> None:
        self.add(RECORD, stream)
        self.markers.made(marker)

    def stream_waits(self, stream: int, marker: Marker, *, by_program: bool) -> None:
        self.add(WAIT, stream, self.markers.of(marker))

    def asked(self, marker: Marker, passed: bool) -> None:
        self.refuse("it asks how far the device is, and what it does may depend on that")

    def host_waits(self, marker: Marker) -> None:
        self.add(HOST_WAIT, self.markers.of(marker))

    def host_waits_for_all(self, *, by_program: bool) -> None:
        self.add(HOST_WAIT_ALL)

    def allocates(self, nbytes: int, stream: int) -> None:
        self.add(MALLOC, nbytes, stream)

    def allocated(self, block: Block) -> None:
        self.blocks.made(block)

    def frees(self, block: Block) -> None:
        place = self.blocks.pop(block)
        self.add(FREE, place)
        self.freed.add(place)
        self._held.append(block)

    def used_on(self, block: Block, stream: int) -> None:
        self.add(USE, self.blocks.of(block), stream)

    def empties_cache(self) -> None:
        self.add(EMPTY_CACHE)

    def reads_statistics(self) -> None:
        self.refuse("it reads the allocator's statistics, and what it does may depend on them")

    def freed_by_clock(self) -> None:
        self.refuse("memory of a collective without a wait is given back once it is done", for_good=True)
