"""The state that a tree's units share: streams, memory handover, rate limiter, and when gathers may start.

And spans around the CPU work of each FSDP event, for traces. A span is named ``FSDP::<event> (<unit>)``;
trace readers attribute a collective's kernel to the unit whose span encloses the launch. Without a profiler a
span costs one attribute look-up and no call into torch.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..collectives.agreement import RankCheck
from ..shared.settings import ScheduleSettings
from ..shared.torch_internals import is_profiler_enabled
from .buffer import Handover
from .streams import Event, Nothing, Stream, Streams

NOTHING = Nothing()


class UnitLabels:
    """The span names of one unit, built once so that the steady state formats no strings."""

    all_gather: str
    all_reduce: str
    limiter_wait: str
    post_backward: str
    post_forward: str
    pre_backward: str
    pre_forward: str
    reduce_scatter: str
    reshard: str
    wait_all_gather: str

    def __init__(self, unit_name: str) -> None:
        for event in UnitLabels.__annotations__:
            setattr(self, event, f"FSDP::{event} ({unit_name})")


def span(label: str) -> AbstractContextManager[object] | Nothing:
    """Return a context that puts ``label`` into the trace while a profiler runs, else does nothing."""
    if is_profiler_enabled():
        return torch.profiler.record_function(label)
    return NOTHING


# With an adapting limit: iterations without a retry before it is raised by one.
_CALM_ITERATIONS = 8


class RateLimiter:
    """Lets the CPU run ahead by no more than ``limit`` gathered units.

    Each freed unit leaves an event on the computation. Before a gather is issued, when ``limit`` events
    are there, the CPU waits for the oldest: the memory that it guards is then free to be handed out.

    Args:
        limit: units in flight; 0 never waits.
        count_retries: how often the allocator had to free its cache and try again. If given, the limit
            adapts: one lower (at least 1) after an iteration with retries, one higher after some without, but
            never again as high as where retries were seen.
    """

    def __init__(self, limit: int, count_retries: Callable[[], int] | None = None) -> None:
        self.limit = limit
        self._events: deque[Event] = deque()
        self._count_retries = count_retries
        self._retries: int | None = None
        self._calm = 0
        self._ceiling: int | None = None

    def freed(self, stream: Stream) -> None:
        """Note that a unit was freed after what ``stream`` has been given so far."""
        if self.limit:
            event = stream.record()
            if event is not None:
                self._events.append(event)

    def wait(self, label: str) -> None:
        """Wait until another unit may be gathered; ``label`` is the span of the wait in a trace."""
        if not self.limit or len(self._events) < self.limit:
            return
        while len(self._events) >= self.limit:
            event = self._events.popleft()
        with span(label):
            event.synchronize()

    def end_iteration(self) -> None:
        """Adapt the limit to what this iteration did to the allocator."""
        if self._count_retries is None:
            return
        before, self._retries = self._retries, self._count_retries()
        if before is None:
            return  # the first iteration fills the cache and says nothing
        if self._retries > before:
            self._ceiling = self.limit - 1
            self.limit = max(1, self._ceiling)
            self._calm = 0
            return
        self._calm += 1
        if self._calm >= _CALM_ITERATIONS and (self._ceiling is None or self.limit < self._ceiling):
            self.limit += 1
            self._calm = 0


class Context:
    """The shared state of one tree of units.

    Args:
        streams: those of the device that the tree computes on.
    """

    def __init__(self, streams: Streams, settings: ScheduleSettings) -> None:
        self.settings = settings
        self.streams = streams
        self.handover = Handover(settings.memory_handover, streams.has_streams)
        # A CPU runs ahead of nothing.
        limit = settings.limit_all_gathers if streams.has_streams else 0
        self.limiter = RateLimiter(limit, streams.count_retries if limit and settings.adapt_limit else None)
        self.rank_check: RankCheck | None = None
        if settings.check_ranks:
            self.rank_check = RankCheck(None if settings.check_ranks is True else settings.check_ranks)
        # With CPU offload: by stream, when its last copy out of a shard on the host is done.
        self.host_reads: dict[Stream, Event | None] = {}
        # Whether shards may have been written since gathers last waited for computation.
        self.gathers_wait = True

    def let_gathers_wait(self, event: Event | None = None) -> None:
        """Let later gathers start only after ``event``, by default after all that computation was given so
        far, which may have written to shards."""
        streams = self.streams
        if event is None:
            event = streams.compute.record()
        # Both read shards: copy-in where they are cast or on the host, all-gather where they are sent as is.
        streams.copy_in.wait(event)
        streams.all_gather.wait(event)
        self.gathers_wait = False

    def shards_may_change(self) -> None:
        """Prepare for code outside that writes to shards, on the device or on the host."""
        self.gathers_wait = True
        self.await_host_read()

    def await_host_read(self) -> None:
        """Wait for copies out of shards on the host, which the user may write to now."""
        for event in self.host_reads.values():
            if event is not None:
                event.synchronize()  # the CPU writes there, and no stream can hold it back
        self.host_reads.clear()
