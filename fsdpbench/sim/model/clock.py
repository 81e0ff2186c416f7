"""The allocator's view of the timeline."""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.model.timeline import UNSETTLED, Marker, Timeline

# The plain ones, also under observers: no program may rely on what the allocator happened to see.
_has_passed, _wait_for, _wait_for_all = Timeline.has_passed, Timeline.wait_for, Timeline.wait_for_all


class StreamTime:
    """When a stream gets to a point: a number of nanoseconds that may not be known yet.

    The allocator compares it with the present (``time > now``); that settles no more of the timeline than
    needed.
    """

    __slots__ = ("_marker", "_timeline")

    def __init__(self, timeline: Timeline, marker: Marker) -> None:
        self._timeline = timeline
        self._marker = marker

    def __gt__(self, now: int, /) -> bool:
        marker = self._marker
        if marker.time == UNSETTLED:
            # Asked of each stream at each allocation: mostly nothing has changed, and needs no call.
            timeline = self._timeline
            return timeline._next_change > timeline.cpu or not _has_passed(timeline, marker)
        return marker.time > now

    def wait(self) -> None:
        """Block the CPU until then."""
        _wait_for(self._timeline, self._marker)


class TimelineClock:
    """`AllocatorClock` over a `Timeline`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def cpu_ns(self) -> int:
        """Where the CPU is now."""
        return self._timeline.cpu

    def stream_ready_ns(self, stream: int) -> StreamTime:
        """When all work that is queued on a stream by now will have ended."""
        return StreamTime(self._timeline, Timeline.record(self._timeline, stream))

    def advance_cpu(self, ns: int) -> None:
        """The CPU works for so long."""
        self._timeline.cpu += ns

    def wait_cpu_until(self, moment: Any) -> None:
        """The CPU blocks until a time: a `StreamTime`, or nanoseconds (no effect if it has passed)."""
        if isinstance(moment, StreamTime):
            moment.wait()
        elif moment > self._timeline.cpu:
            self._timeline.cpu = moment

    def synchronize_device(self) -> None:
        """The CPU blocks until all streams are done."""
        _wait_for_all(self._timeline)
