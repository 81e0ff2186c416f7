"""Observers of the simulated clock and memory, called when a program uses them.

    observe(timeline, observer)     makes it an `ObservedTimeline`, which reports each call
    forget(timeline, observer)      without observers it is a plain `Timeline` again, at no cost

An allocator call is one observation: `TimelineClock` calls the plain `Timeline` for times inside it, and
observers are not notified of those calls.
"""

from typing import Any

from fsdpbench.sim.model.allocator.caching import CachingAllocator
from fsdpbench.sim.model.allocator.types import Block
from fsdpbench.sim.model.timeline import FULL_TRAFFIC, Marker, Timeline, Work


class Observer:
    """Base class of observers of clock and allocator; its methods do nothing.

    Methods in the present tense run before the call that they observe, those in the past tense after it.
    """

    def stream_made(self, stream: int) -> None:
        """Observe a new stream."""

    def launches(self, stream: int, work: Work, duration_ns: int, traffic: int) -> None:
        """Observe a launch of work that takes `duration_ns` alone; `traffic` as in `Timeline.launch`."""

    def drawn_ns(self, work: Work, duration_ns: int) -> int:
        """Return how long the work takes in this run, in ns."""
        return duration_ns

    def recorded(self, stream: int, marker: Marker) -> None:
        """Observe a marker recorded on a stream."""

    def stream_waits(self, stream: int, marker: Marker, *, by_program: bool) -> None:
        """Observe that a stream waits for a marker, as the program or the device itself requested."""

    def asked(self, marker: Marker, passed: bool) -> None:
        """Observe a query for whether the device has reached a marker."""

    def host_waits(self, marker: Marker) -> None:
        """Observe that the CPU blocks until a marker is reached."""

    def host_waits_for_all(self, *, by_program: bool) -> None:
        """Observe that the CPU blocks until the device is idle, for the program or for a measurement."""

    def allocated(self, block: Block) -> None:
        """Observe the allocation of a block."""

    def frees(self, block: Block) -> None:
        """Observe that a block is freed; `stream_uses` are the other streams that used it."""

    def used_on(self, block: Block, stream: int) -> None:
        """Observe work on `stream` that uses a block (`record_stream`)."""


class ObservedTimeline(Timeline):
    """Timeline that reports the program's calls to its observers."""

    def add_stream(self) -> int:
        number = super().add_stream()
        for each in self.observers:
            each.stream_made(number)
        return number

    def launch(
        self, stream: int, work: Work, duration_ns: int, payload: Any = None, traffic: int = FULL_TRAFFIC
    ) -> None:
        """Queue work with duration `duration_ns`, or the duration that observers draw."""
        drawn_ns = duration_ns
        for each in self.observers:
            each.launches(stream, work, duration_ns, traffic)
            drawn_ns = each.drawn_ns(work, drawn_ns)
        super().launch(stream, work, drawn_ns, payload, traffic)

    def record(self, stream: int) -> Marker:
        marker = super().record(stream)
        for each in self.observers:
            each.recorded(stream, marker)
        return marker

    def make_wait(self, stream: int, marker: Marker, payload: Any = None) -> None:
        for each in self.observers:
            each.stream_waits(stream, marker, by_program=True)
        super().make_wait(stream, marker, payload)

    def take_turns(self, stream: int, marker: Marker) -> None:
        for each in self.observers:
            each.stream_waits(stream, marker, by_program=False)
        super().take_turns(stream, marker)

    def has_passed(self, marker: Marker) -> bool:
        passed = super().has_passed(marker)
        for each in self.observers:
            each.asked(marker, passed)
        return passed

    def wait_for(self, marker: Marker) -> None:
        for each in self.observers:
            each.host_waits(marker)
        super().wait_for(marker)

    def wait_for_all(self) -> None:
        for each in self.observers:
            each.host_waits_for_all(by_program=True)
        super().wait_for_all()

    def drain(self) -> None:
        for each in self.observers:
            each.host_waits_for_all(by_program=False)
        super().drain()


class ObservedAllocator(CachingAllocator):
    """Caching allocator that reports its calls to its observers."""

    def malloc(self, nbytes: int, stream: int) -> Block:
        block = super().malloc(nbytes, stream)
        for each in self.observers:
            each.allocated(block)
        return block

    def free(self, block: Block) -> None:
        for each in self.observers:
            each.frees(block)
        super().free(block)

    def record_stream(self, block: Block, stream: int) -> None:
        for each in self.observers:
            each.used_on(block, stream)
        super().record_stream(block, stream)


def observe(observed: Timeline | CachingAllocator, observer: Observer) -> None:
    """Report all calls to `observer`, after the observers added earlier."""
    observed.observers = (*observed.observers, observer)
    _choose_class(observed)


def forget(observed: Timeline | CachingAllocator, observer: Observer) -> None:
    """Stop reporting calls to `observer`."""
    observed.observers = tuple(each for each in observed.observers if each is not observer)
    _choose_class(observed)


def _choose_class(observed: Timeline | CachingAllocator) -> None:
    # Without observers, the plain methods run at no additional cost (`tests/sim/timing/test_observed.py`).
    if isinstance(observed, Timeline):
        observed.__class__ = ObservedTimeline if observed.observers else Timeline
    else:
        observed.__class__ = ObservedAllocator if observed.observers else CachingAllocator
