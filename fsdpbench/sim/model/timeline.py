"""The simulated clock: one CPU that launches work, and streams that execute it.

The CPU runs ahead of the device, as with a real GPU. A launch only appends to its stream's queue. *When* the
work runs is computed later, as soon as it must be known (a synchronization, an event query, reuse of memory,
a full launch queue). Only this makes contention right: a collective slows down kernels that were launched
before it but run at the same time, in proportion to its traffic.

    CPU       |launch k1|launch k2|launch AG|              |wait(e)
                  |         |        |
    stream 0      +--[k1]---[k2......]..               k2 is slower while AG runs,
    stream 1                 +---[AG.......]--(e)      AG is slower while k2 runs
    stream 2                                           a kernel here would share the GPU with k2

Causality: the CPU clock never goes back, so nothing launched later can start earlier. All that the device did
before the CPU's current time is final. `Timeline` determines ("settles") only what it must.

All times are integer nanoseconds. Changes at equal times are settled in order of stream number.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from fsdpbench.base.errors import error_text

NEVER = 1 << 62
UNSETTLED = -1
OUTSIDE = -1
"""Stream number of a marker that other ranks must reach too."""
DEFAULT_STREAM = 0
# The driver queues about this many launches per stream; another blocks the CPU until one has started.
LAUNCH_QUEUE_DEPTH = 1024


class Work(IntEnum):
    """Kinds of queue entries. The first three occupy the device; the others take no time."""

    COMPUTE = 0
    COLLECTIVE = 1
    COPY = 2
    MARK = 3
    WAIT = 4


# Module constants for inner loops: looking up enum members would take a third of the time.
_COMPUTE, _COLLECTIVE, _COPY, _MARK, _WAIT = Work


class Marker:
    """A point in a stream's queue. `time` is `UNSETTLED` until the stream has passed it.

    `clock`: with the sanitizer, the vector clock at this point.
    """

    __slots__ = ("clock", "stream", "time", "waiters")
    clock: list[int]

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.time = UNSETTLED
        self.waiters: list[_Queue] | None = None


class Meeting(Marker):
    """A marker that is passed when other ranks have arrived: this one at `since`, the last just before `at`.

    `arrivals`: this rank's `coupling.Arrival` objects, each with a `key`. `payloads`: the payloads of all
    ranks, by key and rank. `left`: the number of arrivals that are not over yet.
    """

    __slots__ = ("arrivals", "at", "left", "payloads", "since")

    def __init__(self, arrivals: Collection[Any]) -> None:
        super().__init__(OUTSIDE)
        self.arrivals = arrivals
        self.left = len(arrivals)
        self.at = self.since = 0
        self.payloads: dict[Any, dict[int, Any]] = {}


class Link(Protocol):
    """The other ranks (see `coupling.Link`)."""

    bound: int

    @property
    def waits(self) -> bool: ...

    def arrive(self, meeting: Meeting, next_ns: int) -> None: ...

    def hear(self, next_ns: int) -> list[Meeting]: ...


class _Queue:
    """Queued and running work of a stream.

    `change_at` is the time of this stream's next start (if `running` is None) or end of work; `NEVER` if
    it is empty or waits for another stream.
    """

    __slots__ = ("change_at", "free_at", "items", "number", "running", "started_at")

    def __init__(self, number: int) -> None:
        self.number = number
        self.items: deque[_Item] = deque()
        self.running: _Item | None = None
        self.started_at = 0
        self.free_at = 0
        self.change_at = NEVER


# (kind of work, CPU time of the launch, duration if alone, payload to report, traffic),
# (MARK, time, 0, marker) or (WAIT, time, payload to report, marker).
_Item = tuple[Any, ...]
Finished = Callable[[int, Any, int, int], None]


FULL_TRAFFIC = 1000


@dataclass(frozen=True)
class Contention:
    """Mutual slow-down of computation and collectives that run at the same time, in thousandths.

    Computation slows by `compute_permille` during a collective with `FULL_TRAFFIC`, i.e. a large one inside a
    node, and proportionally less during smaller ones, which use fewer channels. Each further stream that
    computes slows the kernels of all of them by `beside_permille`: with 1000 they share the GPU and gain
    nothing, with 0 they do not slow each other.
    """

    compute_permille: int = 1000
    collective_permille: int = 1000
    beside_permille: int = 0

    def __post_init__(self) -> None:
        for name in ("compute_permille", "collective_permille"):
            if getattr(self, name) < 1000:
                raise ValueError(f"{name} = {getattr(self, name)}: a slow-down is at least 1000 thousandths")
        if not 0 <= self.beside_permille <= 1000:
            raise ValueError(f"beside_permille = {self.beside_permille}: not from 0 to 1000 thousandths")

    def of_computation(self, traffic: int, streams: int = 1) -> int:
        """Return the slow-down of kernels during collectives of `traffic`, while `streams` compute."""
        rate = 1000 + (self.compute_permille - 1000) * min(traffic, FULL_TRAFFIC) // FULL_TRAFFIC
        return rate if streams < 2 else rate * (1000 + self.beside_permille * (streams - 1)) // 1000


class Timeline:
    """CPU clock and streams.

    ``cpu`` is the CPU's current time; callers add the CPU's costs to it. ``on_finished(stream, payload,
    start_ns, end_ns)`` is called for each settled piece of work with a payload, in the order of their ends on
    each stream. ``queue_depth``: maximum number of queued launches per stream.
    """

    queue_depth = LAUNCH_QUEUE_DEPTH
    observers: tuple[Any, ...] = ()
    """Observers added by `observed.observe`."""

    def __init__(self, contention: Contention | None = None, on_finished: Finished | None = None) -> None:
        self.cpu = 0
        self.on_finished = on_finished
        self._contention = contention or Contention()
        self._queues: list[_Queue] = []
        self._next_change = NEVER
        self.coupling: Coupling | None = None
        self._reached: list[Meeting] = []  # meetings at which streams wait now, not yet reported to the link
        self.launched_ns = [0, 0, 0]  # by kind of work that takes time, as if alone
        # Number of streams that now run each kind of work, the traffic of their collectives, and the
        # resulting slow-down of computation (thousandths).
        self._active = [0, 0, 0]
        self._traffic = 0
        self._compute_rate = 1000

    def add_stream(self) -> int:
        """Add a stream; return its number."""
        self._queues.append(_Queue(len(self._queues)))
        return len(self._queues) - 1

    def launch(
        self, stream: int, work: Work, duration_ns: int, payload: Any = None, traffic: int = FULL_TRAFFIC
    ) -> None:
        """Queue work on a stream at the CPU's current time; it takes `duration_ns` if it runs alone.

        `traffic`: a collective's traffic in thousandths of that of a large one inside a node.
        """
        queue = self._queues[stream]
        if len(queue.items) >= self.queue_depth:
            self.wait_for_room(stream)
        queue.items.append((work, self.cpu, duration_ns, payload, traffic))
        self.launched_ns[work] += duration_ns
        if queue.running is None and len(queue.items) == 1:
            self._reach_head(queue)

    def record(self, stream: int) -> Marker:
        """Return a marker that the stream reaches when all work queued so far is complete."""
        marker = Marker(stream)
        queue = self._queues[stream]
        if queue.running is None and not queue.items:
            marker.time = max(queue.free_at, self.cpu)
        else:
            queue.items.append((_MARK, self.cpu, 0, marker))
        return marker

    def make_wait(self, stream: int, marker: Marker, payload: Any = None) -> None:
        """Make later work on `stream` wait until `marker` is reached.

        A stream never waits for itself. `payload` is reported with the time that the stream waited.
        """
        if marker.stream == stream:
            return
        queue = self._queues[stream]
        queue.items.append((_WAIT, self.cpu, payload, marker))
        if queue.running is None and len(queue.items) == 1:
            self._reach_head(queue)

    def has_passed(self, marker: Marker) -> bool:
        """Return whether the device has reached `marker` at the CPU's current time."""
        if marker.time == UNSETTLED and self._next_change <= self.cpu:
            self._settle(self.cpu)
        return UNSETTLED < marker.time <= self.cpu

    def is_idle(self, stream: int) -> bool:
        """Return whether all work queued on the stream is complete at the CPU's current time."""
        return self.has_passed(self.record(stream))

    def wait_for(self, marker: Marker) -> None:
        """Block the CPU until the device reaches `marker`."""
        if marker.time == UNSETTLED:
            self._settle(NEVER, marker)
            if marker.time == UNSETTLED:
                raise RuntimeError(error_text("timeline.event", marker.stream))
        if marker.time > self.cpu:
            self.cpu = marker.time

    def wait_for_stream(self, stream: int) -> None:
        """Block the CPU until all work queued on a stream is complete."""
        self.wait_for(self.record(stream))

    def wait_for_all(self) -> None:
        """Block the CPU until the device is idle."""
        self._settle(NEVER)
        for queue in self._queues:
            if queue.items:
                raise RuntimeError(error_text("timeline.stream", queue.number))
            if queue.free_at > self.cpu:
                self.cpu = queue.free_at

    def take_turns(self, stream: int, marker: Marker) -> None:
        """Wait like `make_wait`, requested by the device itself: no program may rely on it."""
        Timeline.make_wait(self, stream, marker)

    def drain(self) -> None:
        """Wait like `wait_for_all`, for a measurement: no program may rely on it."""
        Timeline.wait_for_all(self)

    def wait_for_room(self, stream: int) -> None:
        """Block the CPU until a stream's launch queue has room, like the driver."""
        queue = self._queues[stream]
        while len(queue.items) >= self.queue_depth:
            change = self._next_change
            if self.coupling is not None:
                change = min(self.coupling.next_over, *(each.change_at for each in self._queues))
                if self.coupling.hear(change):
                    continue
            if change == NEVER:
                raise RuntimeError(f"deadlock: the launch queue of stream {stream} is full and never moves")
            self._settle(change)
            if change > self.cpu:
                self.cpu = change

    def _settle(self, limit: int, until: Marker | None = None) -> None:
        """Settle all changes up to time `limit`, in order of time; return early when `until` is reached."""
        queues = self._queues
        while True:
            first = horizon = NEVER
            changing = None
            for queue in queues:
                change = queue.change_at
                if change < first:
                    horizon, first, changing = first, change, queue
                elif change < horizon:
                    horizon = change
            self._next_change = first
            if changing is None or first > limit or self._reached:
                return
            if until is not None and until.time != UNSETTLED:
                return
            if changing.running is None:
                self._start(changing)
            else:
                self._finish(changing, min(horizon, limit), until)

    def _start(self, queue: _Queue) -> None:
        """Start the work at the head of a queue, at its `change_at`."""
        item = queue.items.popleft()
        work = item[0]
        now = queue.change_at
        queue.running = item
        queue.started_at = now
        self._active[work] += 1
        if work is _COLLECTIVE:
            self._traffic += item[4]
            self._adapt_computation(now)
        elif work is _COMPUTE:
            (self._slow_collectives if self._active[work] == 1 else self._adapt_computation)(now)
        queue.change_at = now + item[2] * self._rate(item) // 1000

    def _finish(self, queue: _Queue, horizon: int, until: Marker | None) -> None:
        """End a stream's work, and continue through its queue until another stream changes (`horizon`).

        Consecutive kernels do not change any rates, which keeps the common case cheap.
        """
        items = queue.items
        ended = queue.running
        assert ended is not None
        work = ended[0]
        # No running work has a rate that a gap in this stream would change.
        other_is_idle = work is _COPY or not (self._active[1 - work] or self._active[work] > 1)
        report = self.on_finished
        while True:
            now = queue.free_at = queue.change_at
            payload = queue.running[3]  # type: ignore[index]
            if payload is not None and report is not None:
                report(queue.number, payload, queue.started_at, now)
            stop = False
            while items and items[0][0] is _MARK and items[0][3].waiters is None:
                _, launched_at, _, marker = items.popleft()
                marker.time = max(now, launched_at)
                stop = stop or marker is until
            if not items or items[0][0] is not work or work is _COLLECTIVE:
                break
            start = max(now, items[0][1])
            if start > now and not (other_is_idle and start <= horizon):
                break
            item = queue.running = items.popleft()
            queue.started_at = start
            queue.change_at = start + item[2] * self._rate(item) // 1000
            if stop or queue.change_at > horizon:
                return
        queue.running = None
        self._active[work] -= 1
        if work is _COLLECTIVE:
            self._traffic -= ended[4]
            self._adapt_computation(now)
        elif work is _COMPUTE:
            (self._adapt_computation if self._active[work] else self._slow_collectives)(now)
        self._reach_head(queue)

    def _reach_head(self, queue: _Queue) -> None:
        """Pass marks and fulfilled waits at the head of an idle stream, up to work or a blocking wait."""
        ready = [queue]
        while ready:
            queue = ready.pop()
            queue.change_at = NEVER
            items = queue.items
            while items:
                work, launched_at, payload, marker = items[0][:4]
                if work is not _MARK and work is not _WAIT:
                    queue.change_at = max(queue.free_at, launched_at)
                    break
                if work is _WAIT and marker.time == UNSETTLED:
                    if marker.waiters is None:
                        marker.waiters = []
                    marker.waiters.append(queue)
                    if marker.stream == OUTSIDE:
                        marker.since = max(queue.free_at, launched_at)
                        self._next_change = min(self._next_change, marker.since)
                        self._reached.append(marker)
                    break
                items.popleft()
                if work is _WAIT:
                    waits_from = max(queue.free_at, launched_at)
                    queue.free_at = max(queue.free_at, marker.time)
                    if payload is not None and self.on_finished is not None:
                        self.on_finished(queue.number, payload, waits_from, max(waits_from, marker.time))
                else:
                    marker.time = max(queue.free_at, launched_at)
                    if marker.waiters is not None:
                        ready.extend(marker.waiters)
                        marker.waiters = None
            self._next_change = min(self._next_change, queue.change_at)

    def _rate(self, item: _Item) -> int:
        """Return the current slow-down of work in thousandths."""
        work = item[0]
        if work is _COMPUTE:
            return self._compute_rate
        if work is _COLLECTIVE and self._active[_COMPUTE]:
            return self._contention.collective_permille
        return 1000

    def _adapt_computation(self, now: int) -> None:
        """Move the ends of running computation after a change of collectives or of computing streams."""
        before = self._compute_rate
        rate = self._contention.of_computation(self._traffic, self._active[_COMPUTE])
        if rate == before:
            return
        self._compute_rate = rate
        for queue in self._queues:
            if queue.running is not None and queue.running[0] is _COMPUTE and queue.change_at > now:
                queue.change_at = now + (queue.change_at - now) * rate // before

    def _slow_collectives(self, now: int) -> None:
        """Move the ends of running collectives when computation starts or ends."""
        slowed = self._contention.collective_permille
        before, rate = (1000, slowed) if self._active[_COMPUTE] else (slowed, 1000)
        for queue in self._queues:
            if queue.running is not None and queue.running[0] is _COLLECTIVE and queue.change_at > now:
                queue.change_at = now + (queue.change_at - now) * rate // before


class Coupling:
    """A timeline's coupling to other ranks by `link`. `over`: ended meetings still to be passed, by time."""

    def __init__(self, timeline: Timeline, link: Link) -> None:
        self._timeline = timeline
        self.link = link
        self._over: list[Meeting] = []
        timeline.coupling = self
        # Replace the method, instead of a check in each call: uncoupled ranks pay nothing.
        timeline._settle = self.settle  # type: ignore[method-assign]

    def meet(self, meeting: Meeting) -> None:
        """Block the CPU until all members of a meeting have arrived."""
        timeline = self._timeline
        meeting.since = timeline.cpu
        self.link.arrive(meeting, min(timeline._next_change, timeline.cpu))
        Timeline.wait_for(timeline, meeting)

    def catch_up(self) -> None:
        """Settle all that the device does before the CPU's current time."""
        self.settle(self._timeline.cpu)

    def settle(self, limit: int, until: Marker | None = None) -> None:
        """Settle like `Timeline._settle`, but nothing that other ranks may still change."""
        timeline, link = self._timeline, self.link
        while True:
            self._tell(limit)
            known = min(limit, link.bound) if link.waits else limit
            Timeline._settle(timeline, min(known, self.next_over - 1), until)
            if timeline._reached:
                continue
            if until is not None and until.time != UNSETTLED:
                break
            if self._over and self.next_over <= known:
                self._pass(self._over.pop(0))
            elif not link.waits or known == limit != NEVER:
                break
            else:
                self.hear(min(timeline._next_change, self.next_over, limit))
        if link.waits:  # other ranks may change what happens afterwards
            timeline._next_change = min(timeline._next_change, min(limit, link.bound) + 1)
        timeline._next_change = min(timeline._next_change, self.next_over)

    @property
    def next_over(self) -> int:
        """Return the end of the next meeting that is known to be over."""
        return self._over[0].at if self._over else NEVER

    def _pass(self, meeting: Meeting) -> None:
        """Let the streams that wait for a meeting continue."""
        meeting.time = meeting.at
        for queue in meeting.waiters or ():
            self._timeline._reach_head(queue)
        meeting.waiters = None

    def _tell(self, limit: int) -> None:
        """Report the meetings that this rank has reached; its CPU does nothing before `limit`."""
        reached, self._timeline._reached = self._timeline._reached, []
        for meeting in reached:
            self.link.arrive(meeting, min(self._timeline._next_change, limit))

    def hear(self, change: int) -> bool:
        """Let other ranks reach time `change`, the next one here, or end meetings; return False if neither
        was necessary."""
        self._tell(change)
        if not self.link.waits or (self.link.bound >= change and change != NEVER):
            return False
        # Pass them at their time: what is queued until then must not depend on which rank is faster.
        self._over = sorted([*self._over, *self.link.hear(change)], key=lambda each: each.at)
        return True


# Plain methods, even with observers: what the allocator happens to see guarantees nothing to programs.
_has_passed, _wait_for, _wait_for_all = Timeline.has_passed, Timeline.wait_for, Timeline.wait_for_all


class StreamTime:
    """The time at which a stream reaches a point, in nanoseconds that may not be known yet.

    The allocator compares it with the current time (`time > now`), which settles only as much as needed.
    """

    __slots__ = ("_marker", "_timeline")

    def __init__(self, timeline: Timeline, marker: Marker) -> None:
        self._timeline = timeline
        self._marker = marker

    def __gt__(self, now: int, /) -> bool:
        marker = self._marker
        if marker.time == UNSETTLED:
            # Runs for each stream at each allocation. Usually nothing has changed, and no call is needed.
            timeline = self._timeline
            return timeline._next_change > timeline.cpu or not _has_passed(timeline, marker)
        return marker.time > now

    def wait(self) -> None:
        """Block the CPU until this time."""
        _wait_for(self._timeline, self._marker)


class TimelineClock:
    """`AllocatorClock` that reads a `Timeline`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def cpu_ns(self) -> int:
        """Return the CPU's current time."""
        return self._timeline.cpu

    def stream_ready_ns(self, stream: int) -> StreamTime:
        """Return when all work that is now queued on a stream will have ended."""
        return StreamTime(self._timeline, Timeline.record(self._timeline, stream))

    def advance_cpu(self, ns: int) -> None:
        """Advance the CPU by `ns` of work."""
        self._timeline.cpu += ns

    def wait_cpu_until(self, moment: Any) -> None:
        """Block the CPU until a `StreamTime`, or a time in nanoseconds (no effect if it has passed)."""
        if isinstance(moment, StreamTime):
            moment.wait()
        elif moment > self._timeline.cpu:
            self._timeline.cpu = moment

    def synchronize_device(self) -> None:
        """Block the CPU until all streams are idle."""
        _wait_for_all(self._timeline)
