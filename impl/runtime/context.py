"""The state that the units of a tree share: streams, memory handover, the rate limiter and profiler spans.

A span is put around the CPU work of each FSDP event and is named ``FSDP::<event> (<unit>)``. Trace readers
attribute a collective's kernel to the unit whose span encloses the launch. Without a profiler, a span costs
one attribute look-up and no call into torch.
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
    """The span names of one unit, built once so that a step formats no strings."""

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
    """Return a context manager that records ``label`` if a profiler runs, and else does nothing."""
    if is_profiler_enabled():
        return torch.profiler.record_function(label)
    return NOTHING


# With an adaptive limit: number of iterations without an allocator retry before it increases by one.
_CALM_ITERATIONS = 8


class RateLimiter:
    """Limits how far the CPU may run ahead to ``limit`` gathered units.

    Freeing a unit records an event on the compute stream. If there are ``limit`` events, the CPU waits for
    the oldest before it issues a gather. The allocator can then reuse the memory of that unit.

    Args:
        limit: maximum number of units in flight; 0 means no limit.
        count_retries: returns how often the allocator freed its cache and retried. If given, the limit
            adapts: one lower (at least 1) after an iteration with retries, one higher after some without, but
            never again as high as a limit that had retries.
    """

    def __init__(self, limit: int, count_retries: Callable[[], int] | None = None) -> None:
        self.limit = limit
        self._events: deque[Event] = deque()
        self._count_retries = count_retries
        self._retries: int | None = None
        self._calm = 0
        self._ceiling: int | None = None

    def freed(self, stream: Stream) -> None:
        """Record that a unit is freed after the work queued on ``stream`` up to now."""
        if self.limit:
            event = stream.record()
            if event is not None:
                self._events.append(event)

    def wait(self, label: str) -> None:
        """Block until another unit may be gathered; ``label`` names the span of the wait in a trace."""
        if not self.limit or len(self._events) < self.limit:
            return
        while len(self._events) >= self.limit:
            event = self._events.popleft()
        with span(label):
            event.synchronize()

    def end_iteration(self) -> None:
        """Adapt the limit to the allocator retries of this iteration."""
        if self._count_retries is None:
            return
        before, self._retries = self._retries, self._count_retries()
        if before is None:
            return  # ignore the first iteration, which fills the cache
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
        streams: the streams of the device that the tree computes on.
    """

    def __init__(self, streams: Streams, settings: ScheduleSettings) -> None:
        self.settings = settings
        self.streams = streams
        self.handover = Handover(settings.memory_handover, streams.has_streams)
        # On a CPU device nothing is asynchronous, so no limit is needed.
        limit = settings.limit_all_gathers if streams.has_streams else 0
        self.limiter = RateLimiter(limit, streams.count_retries if limit and settings.adapt_limit else None)
        self.rank_check: RankCheck | None = None
        if settings.check_ranks:
            self.rank_check = RankCheck(None if settings.check_ranks is True else settings.check_ranks)
        # With CPU offload: for each stream, the event of its last copy from a shard on the host.
        self.host_reads: dict[Stream, Event | None] = {}
        # Whether shards may have been written since gathers last waited for the compute stream.
        self.gathers_wait = True

    def let_gathers_wait(self, event: Event | None = None) -> None:
        """Make later gathers wait for ``event``, by default for all work queued on the compute stream, which
        may have written to shards."""
        streams = self.streams
        if event is None:
            event = streams.compute.record()
        # Both streams read shards: copy-in if they are cast or on the host, else all-gather.
        streams.copy_in.wait(event)
        streams.all_gather.wait(event)
        self.gathers_wait = False

    def shards_may_change(self) -> None:
        """Prepare for writes to shards by the user, on the device or on the host."""
        self.gathers_wait = True
        self.await_host_read()

    def await_host_read(self) -> None:
        """Block until copies from shards on the host are done. The user may write to these shards next."""
        for event in self.host_reads.values():
            if event is not None:
                event.synchronize()  # the CPU writes to them, so a wait of a stream would not help
        self.host_reads.clear()
