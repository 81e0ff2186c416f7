"""Observers of the simulated clock and memory, called as a program uses them.

    observe(timeline, observer)     the instance becomes an `ObservedTimeline`, which reports each call
    forget(timeline, observer)      without observers it is a plain `Timeline` again, at no cost

An allocator's call is observed as one: `TimelineClock` asks the plain `Timeline` for the times inside it, so
that observers are not notified of those.
"""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.model.allocator.caching import CachingAllocator
from fsdpbench.sim.model.allocator.types import Block
from fsdpbench.sim.model.timeline import FULL_TRAFFIC, Marker, Timeline, Work


class Observer:
    """Base of observers of clock and allocator; each method does nothing.

    Methods in the present tense are called before the call does its work, those in the past after it.
    """

    def stream_made(self, stream: int) -> None:
        """Observe a new stream."""

    def launches(self, stream: int, work: Work, duration_ns: int, traffic: int) -> None:
        """Observe a launch of work that takes `duration_ns` alone; `traffic` as in `Timeline.launch`."""

    def drawn_ns(self, work: Work, duration_ns: int) -> int:
        """Return how long the work takes in this run, in nanoseconds."""
        return duration_ns

    def recorded(self, stream: int, marker: Marker) -> None:
        """Observe a marker recorded on a stream."""

    def stream_waits(self, stream: int, marker: Marker, *, by_program: bool) -> None:
        """Observe a stream that waits for a marker: requested by the program, or by the device itself."""

    def asked(self, marker: Marker, passed: bool) -> None:
        """Observe a query whether the device has reached a marker."""

    def host_waits(self, marker: Marker) -> None:
        """Observe the CPU blocking until a marker is reached."""

    def host_waits_for_all(self, *, by_program: bool) -> None:
        """Observe the CPU blocking until the device is idle: for the program, or for a measurement."""

    def allocates(self, nbytes: int, stream: int) -> None:
        """Observe a request for a block of at least `nbytes`."""

    def allocated(self, block: Block) -> None:
        """Observe a block handed out."""

    def frees(self, block: Block) -> None:
        """Observe a block being freed; its `stream_uses` are the other streams that used it."""

    def used_on(self, block: Block, stream: int) -> None:
        """Observe work on `stream` that uses a block (`record_stream`)."""

    def empties_cache(self) -> None:
        """Observe the release of unused segments."""

    def reads_statistics(self) -> None:
        """Observe a read of the allocator's counters."""

    def freed_by_clock(self) -> None:
        """Observe memory freed at a time that depends on the device's progress."""

    def returned(self) -> None:
        """Observe the return of the newest call; the CPU's clock may have moved."""


class ObservedTimeline(Timeline):
    """Timeline that reports a program's calls to its observers."""

    def add_stream(self) -> int:
        number = super().add_stream()
        for each in self.observers:
            each.stream_made(number)
        return number

    def launch(
        self, stream: int, work: Work, duration_ns: int, payload: Any = None, traffic: int = FULL_TRAFFIC
    ) -> None:
        """Queue work of `duration_ns`, or of the duration that an observer draws."""
        drawn_ns = duration_ns
        for each in self.observers:
            each.launches(stream, work, duration_ns, traffic)
            drawn_ns = each.drawn_ns(work, drawn_ns)
        super().launch(stream, work, drawn_ns, payload, traffic)
        _returned(self)

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
        _returned(self)

    def wait_for_all(self) -> None:
        for each in self.observers:
            each.host_waits_for_all(by_program=True)
        super().wait_for_all()
        _returned(self)

    def drain(self) -> None:
        for each in self.observers:
            each.host_waits_for_all(by_program=False)
        super().drain()
        _returned(self)


class ObservedAllocator(CachingAllocator):
    """Caching allocator that reports its calls to its observers."""

    def malloc(self, nbytes: int, stream: int) -> Block:
        for each in self.observers:
            each.allocates(nbytes, stream)
        block = super().malloc(nbytes, stream)
        for each in self.observers:
            each.allocated(block)
        _returned(self)
        return block

    def free(self, block: Block) -> None:
        for each in self.observers:
            each.frees(block)
        super().free(block)
        _returned(self)

    def record_stream(self, block: Block, stream: int) -> None:
        for each in self.observers:
            each.used_on(block, stream)
        super().record_stream(block, stream)

    def empty_cache(self) -> None:
        for each in self.observers:
            each.empties_cache()
        super().empty_cache()
        _returned(self)

    def memory_stats(self) -> dict[str, int]:
        for each in self.observers:
            each.reads_statistics()
        return super().memory_stats()


def observe(observed: Timeline | CachingAllocator, observer: Observer) -> None:
    """Report all calls to `observer`, after the observers already added."""
    observed.observers = (*observed.observers, observer)
    _choose_class(observed)


def forget(observed: Timeline | CachingAllocator, observer: Observer) -> None:
    """Stop reporting calls to `observer`."""
    observed.observers = tuple(each for each in observed.observers if each is not observer)
    _choose_class(observed)


def _choose_class(observed: Timeline | CachingAllocator) -> None:
    # Without observers the methods are the plain ones, at no cost (`tests/sim/timing/test_observed.py`).
    if isinstance(observed, Timeline):
        observed.__class__ = ObservedTimeline if observed.observers else Timeline
    else:
        observed.__class__ = ObservedAllocator if observed.observers else CachingAllocator


def _returned(observed: Timeline | CachingAllocator) -> None:
    for each in observed.observers:
        each.returned()
