"""A timeline and an allocator that tell the sanitizer what orders work and who holds which bytes.

Only what a program may rely on orders work: recorded events, waits, synchronisation, a query that answered
yes. What follows from this timing alone does not: the turns of one communicator's kernels, a full launch
queue, blocks that the driver gives back. Those go past these classes, to `Timeline`'s own methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdpbench.sim.followers.jitter import JitteredTimeline
from fsdpbench.sim.model.allocator import Block, CachingAllocator
from fsdpbench.sim.model.timeline import Marker, Timeline

if TYPE_CHECKING:
    from fsdpbench.sim.followers.sanitizer.sanitizer import Sanitizer


class _Watched(Timeline):
    """Passes vector clocks along with markers."""

    sanitizer: Sanitizer

    def add_stream(self) -> int:
        number = super().add_stream()
        self.sanitizer.stream_made(number)
        return number

    def record(self, stream: int) -> Marker:
        marker = super().record(stream)
        marker.clock = self.sanitizer.clocks.record(stream)
        return marker

    def make_wait(self, stream: int, marker: Marker, payload: Any = None) -> None:
        self.sanitizer.stream_waits(stream, marker)
        super().make_wait(stream, marker, payload)

    def has_passed(self, marker: Marker) -> bool:
        passed = super().has_passed(marker)
        if passed:
            self.sanitizer.query_was_true(marker)
        return passed

    def wait_for(self, marker: Marker) -> None:
        super().wait_for(marker)
        self.sanitizer.host_waits(marker)

    def wait_for_all(self) -> None:
        super().wait_for_all()
        self.sanitizer.host_waits_for_all()


class WatchedTimeline(_Watched):
    """A timeline under the sanitizer."""


class WatchedJitteredTimeline(_Watched, JitteredTimeline):
    """The same with jitter."""


class WatchedAllocator(CachingAllocator):
    """A caching allocator that says which bytes change hands."""

    sanitizer: Sanitizer

    def malloc(self, nbytes: int, stream: int) -> Block:
        block = super().malloc(nbytes, stream)
        self.sanitizer.device_memory.allocated(block.address, block.size)
        return block

    def free(self, block: Block) -> None:
        self.sanitizer.device_memory.freed(block.address)
        super().free(block)

    def _record_events(self, block: Block) -> None:
        self.sanitizer.device_memory.events_recorded(block.address, block.size, block.stream_uses or ())
        super()._record_events(block)

    def _event_passed(self, block: Block) -> None:
        if block.event_count == 1:
            self.sanitizer.device_memory.events_passed(block.address)
        super()._event_passed(block)
