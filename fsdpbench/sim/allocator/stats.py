"""The allocator's counters, under the names of ``torch.cuda.memory_stats``.

Counters that change with every block are plain integers of a pool, and their peaks are noted lazily: between two
decreases a counter only grows, so it is enough to look at it before it falls and when it is read. That
halves the cost of an allocation. Counters that change with segments are rare and kept eagerly in `Stat`.
"""

from __future__ import annotations

METRICS = ("current", "peak", "allocated", "freed")


class Stat:
    """One counter with its peak and its historical rises and falls."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        """Add ``amount``; a negative one is a decrease, as in torch."""
        self.current += amount
        if amount >= 0:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= amount

    def reset_peak(self) -> None:
        """The peak is the current value from here on."""
        self.peak = self.current


class BlockStats:
    """Counters of one pool's blocks: current values and what has been given back in all."""

    __slots__ = (
        "active",
        "active_bytes",
        "active_bytes_freed",
        "active_freed",
        "allocated_bytes",
        "allocated_bytes_freed",
        "allocation",
        "allocation_freed",
        "requested_bytes",
        "requested_bytes_freed",
    )

    def __init__(self) -> None:
        for slot in self.__slots__:
            setattr(self, slot, 0)

    active: int
    active_bytes: int
    active_bytes_freed: int
    active_freed: int
    allocated_bytes: int
    allocated_bytes_freed: int
    allocation: int
    allocation_freed: int
    requested_bytes: int
    requested_bytes_freed: int


BLOCK_COUNTERS = ("allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes")
SEGMENT_COUNTERS = ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes")
POOLS = ("all", "small_pool", "large_pool")


class AllocatorStats:
    """All counters of one device; ``small`` and ``large`` are written directly by the hot path."""

    def __init__(self) -> None:
        self.small = BlockStats()
        self.large = BlockStats()
        # Peaks in the order of BLOCK_COUNTERS.
        self._peaks = {pool: [0] * len(BLOCK_COUNTERS) for pool in POOLS}
        self._segment = {name: {pool: Stat() for pool in POOLS} for name in SEGMENT_COUNTERS}
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes that callers hold now."""
        return self.small.allocated_bytes + self.large.allocated_bytes

    @property
    def active_bytes(self) -> int:
        """Bytes that callers hold, or that wait for a stream's event after their free."""
        return self.small.active_bytes + self.large.active_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the device now."""
        return self._segment["reserved_bytes"]["all"].current

    def segment(self, name: str, is_small: bool, amount: int) -> None:
        """Change a segment counter of a pool and of all."""
        stats = self._segment[name]
        stats["all"].increase(amount)
        stats["small_pool" if is_small else "large_pool"].increase(amount)

    def note_peaks(self) -> None:
        """Look at the block counters; to be called before any of them falls."""
        small, large = self.small, self.large
        peaks, small_peaks, large_peaks = (
            self._peaks["all"],
            self._peaks["small_pool"],
            self._peaks["large_pool"],
        )
        for index, name in enumerate(BLOCK_COUNTERS):
            low, high = getattr(small, name), getattr(large, name)
            if low > small_peaks[index]:
                small_peaks[index] = low
            if high > large_peaks[index]:
                large_peaks[index] = high
            if low + high > peaks[index]:
                peaks[index] = low + high

    def reset_peaks(self) -> None:
        """All peaks are the current values from here on."""
        for pool in POOLS:
            self._peaks[pool] = [0] * len(BLOCK_COUNTERS)
        self.note_peaks()
        for stats in self._segment.values():
            for stat in stats.values():
                stat.reset_peak()
        self.oversize_allocations.reset_peak()
        self.oversize_segments.reset_peak()

    def flat(self, max_split_size: int) -> dict[str, int]:
        """Every counter under torch's flat key, sorted by key."""
        self.note_peaks()
        result = {
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "num_sync_all_streams": self.num_sync_all_streams,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
            "num_oom_rejections": 0,
            "max_split_size": max_split_size,
        }
        for index, name in enumerate(BLOCK_COUNTERS):
            for pool in POOLS:
                parts = {
                    "all": (self.small, self.large),
                    "small_pool": (self.small,),
                    "large_pool": (self.large,),
                }
                current = sum(getattr(part, name) for part in parts[pool])
                freed = sum(getattr(part, f"{name}_freed") for part in parts[pool])
                values = (current, self._peaks[pool][index], current + freed, freed)
                result |= {
                    f"{name}.{pool}.{metric}": value for metric, value in zip(METRICS, values, strict=True)
                }
        for name, stats in self._segment.items():
            for pool, stat in stats.items():
                result |= {f"{name}.{pool}.{metric}": getattr(stat, metric) for metric in METRICS}
        for name in ("oversize_allocations", "oversize_segments"):
            stat = getattr(self, name)
            result |= {f"{name}.{metric}": getattr(stat, metric) for metric in METRICS}
        return dict(sorted(result.items()))
