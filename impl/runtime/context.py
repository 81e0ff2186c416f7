"""What the units of one tree share: streams, memory handover, rate limiter, and when gathers may start."""

from __future__ import annotations

from ..collectives.rank_check import RankCheck
from ..shared.settings import ScheduleSettings
from .buffer import Handover
from .rate_limiter import RateLimiter
from .streams import Event, Stream, Streams


class Context:
    """What a unit asks of the tree that it belongs to.

    Args:
        streams: those of the device that the tree computes on.
    """

    def __init__(self, streams: Streams, settings: ScheduleSettings) -> None:
        self.settings = settings
        self.streams = streams
        self.handover = Handover(settings.memory_handover, streams.has_streams)
        self.limiter = RateLimiter(
            settings.limit_all_gathers, streams.count_retries if settings.adapt_limit else None
        )
        self.rank_check: RankCheck | None = None
        if settings.check_ranks:
            self.rank_check = RankCheck(None if settings.check_ranks is True else settings.check_ranks)
        self.host_reads: dict[Stream, Event | None] = {}
        """With CPU offload: by stream, when its last copy out of a shard on the host is done."""
        self.gathers_wait = True
        """Whether shards may have been written since gathers last waited for computation."""

    def let_gathers_wait(self, event: Event | None = None) -> None:
        """Let later gathers start only after ``event``, by default after all that computation was given so
        far, which may have written to shards.
        """
        streams = self.streams
        if event is None:
            event = streams.compute.record()
        streams.copy_in.wait(event)
        streams.all_gather.wait(event)
        self.gathers_wait = False

    def shards_may_change(self) -> None:
        """Code outside is about to write to shards, on the device or on the host."""
        self.gathers_wait = True
        self.await_host_read()

    def await_host_read(self) -> None:
        """The user may write to shards on the host now: copies out of them have to be done."""
        for event in self.host_reads.values():
            if event is not None:
                event.synchronize()
        self.host_reads.clear()
