"""One step, watched: what it does in order, and what a CUDA graph could not hold of it.

The rules are those of stream capture (CUDA programming guide, "Creating a Graph Using Stream Capture") and of
torch's allocator during one:

* the CPU waits for nothing and asks nothing: no `.item()`, no synchronisation, no query, no copy of memory
  that is not pinned (cudaErrorStreamCaptureUnsupported);
* no stream waits for an event from before the step (cudaErrorStreamCaptureIsolation), and every stream that
  works follows the step's own stream first and is awaited by it in the end (cudaErrorStreamCaptureUnjoined);
* no cudaMalloc, no cudaFree: a step that repeats itself needs neither;
* no `record_stream` of memory that is then freed: the allocator gives such memory back after the capture only
  (`needs_events_deferred_until_no_capture`), so that the step would need more memory than it does here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fsdpbench.sim.followers.sanitizer.places import frames
from fsdpbench.sim.followers.sanitizer.shadow import Stacks
from fsdpbench.sim.model.allocator.types import Block
from fsdpbench.sim.model.observed import Observer
from fsdpbench.sim.model.timeline import Marker, Work

Entry = tuple[Any, ...]

_ASKED_BY = {
    "_item": ".item()",
    "_equal": "torch.equal or allclose",
    "_to_copy": "a copy between host and device that the CPU waits for",
    "_copy": "a copy between host and device that the CPU waits for",
    "Event.synchronize": "Event.synchronize()",
    "Event.query": "Event.query()",
    "Stream.synchronize": "Stream.synchronize()",
    "Stream.query": "Stream.query()",
    "CollectiveWork.wait": "a barrier",
    "CollectiveWork.is_completed": "Work.is_completed()",
}
_SYNCHRONISES = "a synchronisation"


class WatchedStep(Observer):
    """The observer of one step, which notes what the program does.

    Args:
        origin: the stream that the step starts on.
        expected: what the step before did; `difference` is the first thing that is done otherwise.
    """

    def __init__(self, origin: int, expected: list[Entry] | None) -> None:
        self._origin = origin
        self._expected = expected
        self._markers: dict[int, tuple[Marker, dict[int, int]]] = {}
        self._orders: dict[int, dict[int, int]] = {origin: {}}
        self._work: dict[int, int] = {}
        self.trail: list[Entry] = []
        self.difference: str | None = None
        self.violation: str | None = None

    @property
    def kernels(self) -> int:
        """Launches so far."""
        return sum(self._work.values())

    @property
    def streams(self) -> int:
        """Streams that work."""
        return len(self._work)

    def finish(self) -> None:
        """End the step: its stream has to wait for all others."""
        reached = self._orders[self._origin]
        for stream, count in self._work.items():
            if stream != self._origin and reached.get(stream, 0) < count:
                self.violate(f"work on stream {stream} is not awaited when the step ends")
        if self._expected is not None and len(self.trail) < len(self._expected):
            self.difference = self.difference or "it ends earlier than the step before"

    def violate(self, what: str) -> None:
        """Note that no graph can hold this, with its place, unless something else came first."""
        if self.violation is None:
            self.violation = f"{what}, at {_place()}"

    def note(self, entry: Entry, what: Callable[[], str]) -> None:
        """Append the next thing that the step does; `what` says it in words."""
        expected, index = self._expected, len(self.trail)
        self.trail.append(entry)
        if expected is None or self.difference is not None:
            return
        if index >= len(expected) or expected[index] != entry:
            self.difference = f"{what()}, at {_place()}"

    # ----------------------------------------------------------------------------------- as an observer

    def launches(self, stream: int, work: Work, duration_ns: int, traffic: int) -> None:
        self.note(("launch", stream, work, duration_ns), lambda: f"other work is launched on stream {stream}")
        if stream not in self._orders:
            self.violate(f"stream {stream} works without having followed the step's own stream")
            self._orders[stream] = {}
        count = self._work[stream] = self._work.get(stream, 0) + 1
        self._orders[stream][stream] = count

    def recorded(self, stream: int, marker: Marker) -> None:
        self._markers[id(marker)] = (marker, dict(self._orders.get(stream, {})))

    def stream_waits(self, stream: int, marker: Marker, *, by_program: bool) -> None:
        if not by_program:
            return
        found = self._markers.get(id(marker))
        if found is None:
            self.violate(f"stream {stream} waits for an event from before the step")
            return
        order = self._orders.setdefault(stream, {})
        for other, count in found[1].items():
            order[other] = max(order.get(other, 0), count)

    def asked(self, marker: Marker, passed: bool) -> None:
        self.violate(f"the CPU asks the device: {_asked()}")

    def host_waits(self, marker: Marker) -> None:
        self.violate(f"the CPU waits for the device: {_asked()}")

    def host_waits_for_all(self, *, by_program: bool) -> None:
        if by_program:
            self.violate(f"the CPU waits for the device: {_asked()}")

    def allocated(self, block: Block) -> None:
        self.note((block.address, block.size), lambda: f"{block.size} bytes are at another address")

    def used_on(self, block: Block, stream: int) -> None:
        if stream != block.stream:
            self.violate(
                "record_stream, whose memory the allocator gives back after the capture only (pass it by "
                "events: memory_handover=events)"
            )


def _place() -> str:
    told = frames(Stacks().here(2))
    return told[0] if told else "a place without Python"


def _asked() -> str:
    """By which of the device's functions the CPU asks or waits."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_qualname
        found = _ASKED_BY.get(name) or _ASKED_BY.get(name.partition(".<locals>")[0])
        if found is not None:
            return found
        frame = frame.f_back
    return _SYNCHRONISES
