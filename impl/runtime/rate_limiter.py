"""How far the CPU may run ahead of the device: by the memory of ``limit`` gathered units."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..shared.annotations import span
from .streams import Event, Stream

_CALM_ITERATIONS = 8
"""With an adapting limit: iterations without a retry before it is raised by one."""


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
        """A unit was freed after what ``stream`` has been given so far."""
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
