"""What the allocator shares with its callers: blocks, the clock it reads, its events and its one error."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol


class StreamMoment(Protocol):
    """A time in nanoseconds that need not be known yet: it only has to say whether it is still to come.

    An int is one. A clock that settles times late answers with an object, and settles no more than is asked.
    """

    def __gt__(self, now: int, /) -> bool: ...


class AllocatorClock(Protocol):
    """Simulated time as the allocator sees it, in integer nanoseconds."""

    def cpu_ns(self) -> int:
        """Where the CPU is now."""

    def stream_ready_ns(self, stream: int) -> StreamMoment:
        """When all work that is queued on a stream by now will have ended."""

    def advance_cpu(self, ns: int) -> None:
        """The CPU works for so long."""

    def wait_cpu_until(self, moment: Any) -> None:
        """The CPU blocks until a time (no effect if it has passed)."""

    def synchronize_device(self) -> None:
        """The CPU blocks until all streams are done."""


class SimOutOfMemoryError(RuntimeError):
    """The simulated device has no room, also after all cached blocks were given back."""


class Block:
    """A piece of a segment: handed to a caller, or cached and free.

    ``address`` and ``size`` (bytes, rounded as the allocator rounds) and ``requested`` (bytes asked for) are
    for callers; the rest is the allocator's own. ``prev`` and ``next`` are the neighbours in the segment.
    """

    __slots__ = (
        "address",
        "allocated",
        "event_count",
        "expandable",
        "gc_base",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "size",
        "stream",
        "stream_uses",
    )

    def __init__(self, address: int, size: int, stream: int, pool: BlockPoolLike) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.stream = stream
        self.pool = pool
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.event_count = 0
        self.stream_uses: set[int] | None = None
        self.mapped = True
        self.expandable: ExpandableSegmentLike | None = None
        self.gc_base = 0

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        state = "allocated" if self.allocated else "pending" if self.event_count else "free"
        return f"Block({self.address:#x}, {self.size} B, stream {self.stream}, {state})"


class BlockPoolLike(Protocol):
    """What a block needs to know of its pool."""

    is_small: bool


class ExpandableSegmentLike(Protocol):
    """What a block needs to know of the expandable segment it is in."""

    page_size: int


class AllocatorAction(Enum):
    """What happened, in the words of ``torch.cuda.memory._snapshot``; ``RETRY`` is ours."""

    ALLOC = "alloc"
    FREE = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    RETRY = "retry"
    OOM = "oom"


class AllocatorEvent(NamedTuple):
    """One thing the allocator did. Bytes and nanoseconds; ``allocated`` and ``reserved`` are the totals
    after it.

    For ``RETRY``, ``size`` is what was asked for and ``freed`` what the flush of the cache gave back.
    """

    action: AllocatorAction
    address: int
    size: int
    stream: int
    allocated: int
    reserved: int
    time_ns: int
    freed: int = 0


AllocatorListener = Callable[[AllocatorEvent], None]
