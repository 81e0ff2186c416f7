"""Clock and allocator report calls to their observers; without observers they are the plain classes."""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.model.allocator import CachingAllocator
from fsdpbench.sim.model.observed import Observer, forget, observe
from fsdpbench.sim.model.timeline import Timeline, TimelineClock, Work


class Heard(Observer):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def launches(self, stream: int, work: Work, duration_ns: int, traffic: int) -> None:
        self.calls.append(("launches", duration_ns))

    def drawn_ns(self, work: Work, duration_ns: int) -> int:
        return 2 * duration_ns

    def recorded(self, stream: int, marker: Any) -> None:
        self.calls.append(("recorded", stream))

    def allocated(self, block: Any) -> None:
        self.calls.append(("allocated", block.requested))

    def frees(self, block: Any) -> None:
        self.calls.append(("frees", sorted(block.stream_uses or ())))


def test_without_observers_nothing_is_paid() -> None:
    timeline, heard = Timeline(), Heard()
    stream = timeline.add_stream()
    observe(timeline, heard)
    timeline.launch(stream, Work.COMPUTE, 10)
    timeline.wait_for_all()
    assert timeline.cpu == 20  # as the observer drew it
    forget(timeline, heard)
    assert type(timeline) is Timeline
    timeline.launch(stream, Work.COMPUTE, 10)
    timeline.wait_for_all()
    assert timeline.cpu == 30
    assert heard.calls == [("launches", 10)]


def test_an_allocators_own_questions_to_the_clock_are_not_reported() -> None:
    timeline, heard = Timeline(), Heard()
    for _ in range(2):
        timeline.add_stream()
    allocator = CachingAllocator(1 << 30, TimelineClock(timeline))
    observe(timeline, heard)
    observe(allocator, heard)
    block = allocator.malloc(1000, 0)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.malloc(1000, 0)
    assert heard.calls == [("allocated", 1000), ("frees", [1]), ("allocated", 1000)]
    forget(allocator, heard)
    assert type(allocator) is CachingAllocator
