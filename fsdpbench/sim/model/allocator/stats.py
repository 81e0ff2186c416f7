"""The allocator's counters, under the keys of ``torch.cuda.memory_stats``.

Counters that change with every block are plain integers of a pool, with lazy peaks: between two decreases a
counter only grows, so its peak is updated only before a decrease and when it is read. That halves the cost of
an allocation. Counters that change with segments change rarely; `Stat` updates their peaks immediately.
"""

import math
from collections import Counter

METRICS = ("current", "peak", "allocated", "freed")
BLOCK_COUNTERS = ("allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes")
SPLIT_COUNTERS = ("inactive_split", "inactive_split_bytes")
SEGMENT_COUNTERS = ("segment", "reserved_bytes")
POOLS = ("all", "small_pool", "large_pool")


class Stat:
    """One counter with its peak and its total increases and decreases."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        """Add `amount`; as in torch, a negative amount is a decrease."""
        self.current += amount
        if amount >= 0:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= amount

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.peak = self.current


class HostStats:
    """Counters of pinned host memory, which torch allocates in blocks of powers of two and caches.

    Args:
        most: bytes of the host's memory for one GPU, pinned and not.
    """

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self.pageable = Stat()
        """Bytes of large host tensors that are not pinned."""
        names = "allocations", "allocated_bytes", "active_requests", "active_bytes"
        self._stats = {name: Stat() for name in names}
        self._kept = Counter[int]()

    @property
    def bytes_held(self) -> int:
        """Return the bytes that callers hold, pinned and not."""
        return self._stats["active_bytes"].current + self.pageable.current

    def hand_out(self, nbytes: int) -> None:
        """Count a block given to a caller: a cached block of this size, otherwise a new one."""
        if self._kept[nbytes]:
            self._kept[nbytes] -= 1
        else:
            self._stats["allocations"].increase(1)
            self._stats["allocated_bytes"].increase(nbytes)
        self._stats["active_requests"].increase(1)
        self._stats["active_bytes"].increase(nbytes)

    def take_back(self, nbytes: int) -> None:
        """Count a block that a caller frees, and cache it."""
        self._kept[nbytes] += 1
        self._stats["active_requests"].increase(-1)
        self._stats["active_bytes"].increase(-nbytes)

    def reset(self, *, peaks: bool) -> None:
        """Set the peaks to the current values, or else the total increases and decreases to 0."""
        for stat in self._stats.values():
            if peaks:
                stat.reset_peak()
            else:
                stat.allocated = stat.freed = 0

    def nested(self) -> dict[str, object]:
        """Return the counters like torch's `host_memory_stats_as_nested_dict`; pinning takes no time here."""
        time = dict.fromkeys(("total", "max", "min", "count", "avg"), 0)
        new, freed = self._stats["allocations"].allocated, self._stats["allocations"].freed
        stats = {name: {key: getattr(stat, key) for key in METRICS} for name, stat in self._stats.items()}
        times = {"host_alloc_time": time | {"count": new}, "host_free_time": time | {"count": freed}}
        return {**stats, **times, "num_host_alloc": new, "num_host_free": freed}


class BlockStats:
    """Counters of one pool's blocks: current values, peaks as of the last `note_peaks`, and totals freed."""

    __slots__ = (
        "active", "active_bytes", "active_bytes_freed", "active_bytes_peak", "active_freed", "active_peak",
        "allocated_bytes", "allocated_bytes_freed", "allocated_bytes_peak", "allocation", "allocation_freed",
        "allocation_peak", "requested_bytes", "requested_bytes_freed", "requested_bytes_peak",
    )  # fmt: skip

    def __init__(self) -> None:
        self.allocation = self.allocation_peak = self.allocation_freed = 0
        self.active = self.active_peak = self.active_freed = 0
        self.allocated_bytes = self.allocated_bytes_peak = self.allocated_bytes_freed = 0
        self.active_bytes = self.active_bytes_peak = self.active_bytes_freed = 0
        self.requested_bytes = self.requested_bytes_peak = self.requested_bytes_freed = 0

    def note_peaks(self) -> None:
        """Raise each peak to the current value if that is higher."""
        if self.allocation > self.allocation_peak:
            self.allocation_peak = self.allocation
        if self.active > self.active_peak:
            self.active_peak = self.active
        if self.allocated_bytes > self.allocated_bytes_peak:
            self.allocated_bytes_peak = self.allocated_bytes
        if self.active_bytes > self.active_bytes_peak:
            self.active_bytes_peak = self.active_bytes
        if self.requested_bytes > self.requested_bytes_peak:
            self.requested_bytes_peak = self.requested_bytes

    def reset_peaks(self) -> None:
        """Set the peaks to the current values."""
        for name in BLOCK_COUNTERS:
            setattr(self, f"{name}_peak", getattr(self, name))


class AllocatorStats:
    """All counters of one device. The allocator's hot path writes `small` and `large` directly."""

    def __init__(self) -> None:
        self.small = BlockStats()
        self.large = BlockStats()
        # Sums over both pools; `note_peaks` updates them.
        self._all = BlockStats()
        self._stats = {name: {pool: Stat() for pool in POOLS} for name in SPLIT_COUNTERS + SEGMENT_COUNTERS}
        self._splits = {
            is_small: tuple(self._stats[name][pool] for name in SPLIT_COUNTERS for pool in ("all", own))
            for is_small, own in ((True, "small_pool"), (False, "large_pool"))
        }
        self._reserved = self._stats["reserved_bytes"]["all"]
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that callers hold."""
        return self.small.allocated_bytes + self.large.allocated_bytes

    @property
    def active_bytes(self) -> int:
        """Return the bytes that callers hold or that wait for a stream's event after being freed."""
        return self.small.active_bytes + self.large.active_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes taken from the device."""
        return self._reserved.current

    def segment(self, is_small: bool, count: int, nbytes: int) -> None:
        """Add segments and reserved bytes to a pool and to the totals; negative numbers remove them."""
        pool = "small_pool" if is_small else "large_pool"
        for name, amount in (("segment", count), ("reserved_bytes", nbytes)):
            self._stats[name]["all"].increase(amount)
            self._stats[name][pool].increase(amount)

    def inactive_split(self, is_small: bool, count: int, nbytes: int) -> None:
        """Add free blocks (and bytes) that are part of a larger segment; negative numbers remove them."""
        # `Stat.increase` is inlined: this runs for nearly every allocation.
        blocks, own_blocks, held, own_held = self._splits[is_small]
        blocks.current += count
        own_blocks.current += count
        if count < 0:
            blocks.freed -= count
            own_blocks.freed -= count
        elif count:
            blocks.allocated += count
            own_blocks.allocated += count
            if blocks.current > blocks.peak:
                blocks.peak = blocks.current
            if own_blocks.current > own_blocks.peak:
                own_blocks.peak = own_blocks.current
        held.current += nbytes
        own_held.current += nbytes
        if nbytes < 0:
            held.freed -= nbytes
            own_held.freed -= nbytes
        elif nbytes:
            held.allocated += nbytes
            own_held.allocated += nbytes
            if held.current > held.peak:
                held.peak = held.current
            if own_held.current > own_held.peak:
                own_held.peak = own_held.current

    def note_peaks(self) -> None:
        """Raise the peaks of block counters; must be called before any of these counters falls."""
        small, large, both = self.small, self.large, self._all
        small.note_peaks()
        large.note_peaks()
        both.allocation = small.allocation + large.allocation
        both.active = small.active + large.active
        both.allocated_bytes = small.allocated_bytes + large.allocated_bytes
        both.active_bytes = small.active_bytes + large.active_bytes
        both.requested_bytes = small.requested_bytes + large.requested_bytes
        both.note_peaks()

    def reset_peaks(self) -> None:
        """Set all peaks to the current values."""
        self.note_peaks()
        for part in (self.small, self.large, self._all):
            part.reset_peaks()
        for stats in self._stats.values():
            for stat in stats.values():
                stat.reset_peak()
        self.oversize_allocations.reset_peak()
        self.oversize_segments.reset_peak()

    def flat(self, max_split_size: int) -> dict[str, int]:
        """Return all counters under torch's flat keys, sorted by key; `max_split_size` in bytes."""
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
        pools = {"small_pool": (self.small,), "large_pool": (self.large,), "all": (self.small, self.large)}
        peaks = {"small_pool": self.small, "large_pool": self.large, "all": self._all}
        for name in BLOCK_COUNTERS:
            for pool, parts in pools.items():
                current = sum(getattr(part, name) for part in parts)
                freed = sum(getattr(part, f"{name}_freed") for part in parts)
                peak = getattr(peaks[pool], f"{name}_peak")
                values = zip(METRICS, (current, peak, current + freed, freed), strict=True)
                result |= {f"{name}.{pool}.{metric}": value for metric, value in values}
        for name, stats in self._stats.items():
            for pool, stat in stats.items():
                result |= {f"{name}.{pool}.{metric}": getattr(stat, metric) for metric in METRICS}
        for name in ("oversize_allocations", "oversize_segments"):
            stat = getattr(self, name)
            result |= {f"{name}.{metric}": getattr(stat, metric) for metric in METRICS}
        return dict(sorted(result.items()))
