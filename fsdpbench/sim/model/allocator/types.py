"""Types that the allocator shares with its callers: blocks, the clock, events and the out-of-memory error."""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol


class StreamMoment(Protocol):
    """A time in nanoseconds that may not be known yet, but can be compared with the current time.

    An int qualifies. A clock that determines times lazily returns an object that computes only what it must.
    """

    def __gt__(self, now: int, /) -> bool: ...


class AllocatorClock(Protocol):
    """Simulated time for the allocator, in integer nanoseconds."""

    def cpu_ns(self) -> int:
        """Return the CPU's current time."""

    def stream_ready_ns(self, stream: int) -> StreamMoment:
        """Return when all work that is now queued on a stream will have ended."""

    def advance_cpu(self, ns: int) -> None:
        """Advance the CPU by `ns` of work."""

    def wait_cpu_until(self, moment: Any) -> None:
        """Block the CPU until a time (no effect if it has passed)."""

    def synchronize_device(self) -> None:
        """Block the CPU until all streams are idle."""


class SimOutOfMemoryError(RuntimeError):
    """The simulated device has no room, even after all cached blocks were released."""


class Block:
    """Part of a segment: given to a caller, or cached and free.

    Callers use `address`, `size` (bytes after the allocator's rounding) and `requested` (bytes requested).
    The other attributes belong to the allocator. `prev` and `next` are the neighbours in the segment.
    """

    __slots__ = (
        "address", "allocated", "event_count", "expandable", "gc_base", "mapped", "next", "pool", "prev",
        "requested", "size", "stream", "stream_uses",
    )  # fmt: skip

    def __init__(self, address: int, size: int, stream: int, pool: "BlockPoolLike") -> None:
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
        """Return whether the block is only part of its segment."""
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        state = "allocated" if self.allocated else "pending" if self.event_count else "free"
        return f"Block({self.address:#x}, {self.size} B, stream {self.stream}, {state})"


class BlockPoolLike(Protocol):
    """The part of a pool that a block uses."""

    is_small: bool


class ExpandableSegmentLike(Protocol):
    """The part of an expandable segment that its blocks use."""

    page_size: int


class AllocatorAction(Enum):
    """Actions of the allocator, named as in `torch.cuda.memory._snapshot`; only `RETRY` is not torch's."""

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
    """One action of the allocator, in bytes and ns. `allocated`, `reserved`: totals after the action.

    For `RETRY`, `size` is the request in bytes and `freed` the bytes released from the cache.
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
