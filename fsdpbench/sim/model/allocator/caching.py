"""The caching allocator: how blocks are found, split, freed, merged and returned to the device.

A port of the *behaviour* of CUDACachingAllocator (torch 2.11 to 2.13), in simulated time.
    malloc ── best-fitting free block of this stream? ── yes ──> split off the remainder
                 │ no
                 ├─ garbage collection (if a memory fraction is set), a new segment from the driver
                 ├─ release enough large cached blocks (only with max_split_size), try again
                 └─ wait for events, free all cached blocks, try again (an alloc retry); else out of memory

    free ──── used on other streams (`record_stream`)? ── no ──> merge with free neighbours, back to its pool
                 │ yes
                 └─ record an event on each; *active* until a later malloc finds that all have passed
"""

from bisect import bisect_left
from collections import deque
from dataclasses import replace
from typing import Any

from fsdpbench.base.errors import error_text
from fsdpbench.sim.model.allocator.conf import UNLIMITED, AllocatorConf, AllocatorCosts
from fsdpbench.sim.model.allocator.expandable import DeviceMemory, ExpandableSegments
from fsdpbench.sim.model.allocator.pools import (
    MIN_BLOCK,
    SMALL_SIZE,
    BlockPool,
    block_size,
    collect_garbage,
    merge,
    oversize_to_release,
    segment_size,
    split_front,
)
from fsdpbench.sim.model.allocator.stats import AllocatorStats
from fsdpbench.sim.model.allocator.types import (
    AllocatorAction,
    AllocatorClock,
    AllocatorEvent,
    AllocatorListener,
    Block,
    SimOutOfMemoryError,
    StreamMoment,
)


class CachingAllocator:
    """Caching allocator of one simulated device; not thread-safe.

    `capacity_bytes` limits the memory taken from the device. `total_bytes` (default: the same) is the
    device's memory in the out-of-memory message. `listener` receives an `AllocatorEvent` for each action,
    but `FREE_COMPLETED` only while `tells_completion` is set.
    """

    observers: tuple[Any, ...] = ()
    """Observers added by `observed.observe`."""

    def __init__(
        self,
        capacity_bytes: int,
        clock: AllocatorClock,
        conf: AllocatorConf | None = None,
        listener: AllocatorListener | None = None,
        *,
        costs: AllocatorCosts | None = None,
        total_bytes: int | None = None,
    ) -> None:
        self.conf = conf or AllocatorConf()
        self.costs = costs or AllocatorCosts()
        self.listener = listener
        self.tells_completion = True
        self.stats = AllocatorStats()
        self.small_pool = BlockPool(is_small=True)
        self.large_pool = BlockPool(is_small=False)
        self.active_blocks: dict[int, Block] = {}
        self.device = DeviceMemory(capacity_bytes, clock, self.costs)
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self._limit = UNLIMITED
        self._expandable = ExpandableSegments(self.device, self.stats, UNLIMITED)
        if self.conf.per_process_memory_fraction is not None:
            self.limit(self.conf.per_process_memory_fraction)
        self._clock = clock
        # Events of freed blocks by stream, oldest first: (time when the stream reaches the event, block)
        self._pending: dict[int, deque[tuple[StreamMoment, Block]]] = {}
        # If set, `note_peaks` must run before any counter falls (test_every_step_equals_the_brute_force).
        self._risen = False

    def limit(self, fraction: float) -> None:
        """Limit memory to this share of the device from now on."""
        self.conf = replace(self.conf, per_process_memory_fraction=fraction)
        self._limit = self._expandable.limit_bytes = int(self.total_bytes * fraction)

    def malloc(self, nbytes: int, stream: int) -> Block:
        """Return a block of at least `nbytes` (0 counts as 1) for use on `stream`.

        Raises `SimOutOfMemoryError` with torch's message without room, `ValueError` for a negative size.
        """
        if self._pending:  # test_events_of_one_stream_pass_in_order_but_streams_do_not_block_each_other
            self._process_events()
        conf = self.conf
        if conf.roundup_power2_divisions:
            size = block_size(nbytes, conf)
        else:
            size = (nbytes + 511) & -512 if nbytes > MIN_BLOCK else MIN_BLOCK
        small = size <= SMALL_SIZE
        pool = self.small_pool if small else self.large_pool

        block = self._take_free_block(pool, size, stream)
        if block is None:
            if nbytes < 0:
                raise ValueError(f"allocation of {nbytes} bytes: must not be negative")
            block = self._grow(pool, size, stream, nbytes)

        remaining = block.size - size
        if small or conf.expandable_segments:
            split = remaining >= MIN_BLOCK
        else:
            split = remaining > SMALL_SIZE and size < conf.max_split_bytes
        if split:
            block = self._split(block, size, pool)
        elif block.expandable is None and (block.prev is not None or block.next is not None):
            self.stats.inactive_split(small, -1, -block.size)

        size = block.size
        block.allocated = True
        block.requested = nbytes
        self.active_blocks[block.address] = block
        counters = self.stats.small if small else self.stats.large
        counters.allocation += 1
        counters.active += 1
        counters.allocated_bytes += size
        counters.active_bytes += size
        counters.requested_bytes += nbytes
        self._risen = True
        if size >= conf.max_split_bytes:
            self.stats.oversize_allocations.increase(1)
        if self.listener is not None:
            self._tell(AllocatorAction.ALLOC, block.address, size, stream)
        return block

    def _split(self, rest: Block, size: int, pool: BlockPool) -> Block:
        """Return the first `size` bytes of a free block; put the remainder back into its pool."""
        was_split = rest.prev is not None or rest.next is not None
        block = split_front(rest, size, pool)
        pool.insert(rest)
        if block.expandable is None:
            if was_split:
                self.stats.inactive_split(pool.is_small, 0, -size)
            else:
                self.stats.inactive_split(pool.is_small, 1, rest.size)
        return block

    def free(self, block: Block) -> None:
        """Free a block. If other streams used it, it stays active until they have passed this point."""
        if not block.allocated:
            raise ValueError(f"{block!r} is freed, but was not allocated")
        if self._risen:
            self.stats.note_peaks()
            self._risen = False
        block.allocated = False
        size = block.size
        counters = self.stats.small if block.pool.is_small else self.stats.large
        counters.allocation -= 1
        counters.allocation_freed += 1
        counters.allocated_bytes -= size
        counters.allocated_bytes_freed += size
        if size >= self.conf.max_split_bytes:
            self.stats.oversize_allocations.increase(-1)
        if self.listener is not None:
            self._tell(AllocatorAction.FREE, block.address, size, block.stream)
        if block.stream_uses:  # test_a_recorded_block_stays_active_until_its_stream_has_passed
            self._record_events(block)
        else:
            self._free_block(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Keep a block that `stream` uses, but does not own, until the work queued on it is complete."""
        if stream == block.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = set()
        block.stream_uses.add(stream)

    def empty_cache(self) -> None:
        """Wait for outstanding events and return all unused segments to the device."""
        self._release_cached_blocks()

    def memory_stats(self) -> dict[str, int]:
        """Return all counters under the flat keys of `torch.cuda.memory_stats`."""
        limit = self.conf.max_split_bytes
        return self.stats.flat(max_split_size=-1 if limit == UNLIMITED else limit)

    def reset_peak_memory_stats(self) -> None:
        """Reset all peaks to the current values."""
        self._risen = False
        self.stats.reset_peaks()

    def _take_free_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Remove and return the best fit on the stream: the smallest block, then the lowest address."""
        pool.searches += 1
        entries = pool.free.get(stream)
        if not entries:
            return None
        index = bisect_left(entries, (size, 0))
        if index == len(entries):
            return None
        conf = self.conf
        block = entries[index][2]
        if block.expandable is not None:
            # The last free block can grow: compare sizes after growth, so it is not used up early.
            while block.expandable is not None and index + 1 < len(entries):
                following = entries[index + 1][2]
                if _expandable_size(following) >= _expandable_size(block):
                    break
                index += 1
                block = following
        limit = conf.max_split_bytes
        if size < limit:
            if block.size >= limit:
                return None
        elif block.size >= size + conf.max_non_split_rounding_bytes:
            return None
        del entries[index]
        return block

    def _grow(self, pool: BlockPool, size: int, stream: int, nbytes: int) -> Block:
        """Return a block from the device: collect garbage, allocate, release and retry, in torch's order."""
        conf = self.conf
        if conf.garbage_collection_threshold > 0 and conf.per_process_memory_fraction is not None:
            threshold = int(conf.garbage_collection_threshold * self._limit)
            excess = self.stats.reserved_bytes - threshold
            for cached in collect_garbage(self.large_pool, excess):
                self._release_segment(cached, self.large_pool)
        block = self._new_segment(pool, size, stream)
        if block is None and self._release_oversize_blocks(pool, size, stream):
            block = self._new_segment(pool, size, stream)
        if block is None:
            freed = self._release_cached_blocks()
            self.stats.num_alloc_retries += 1
            if self.listener is not None:
                self._tell(AllocatorAction.RETRY, 0, size, stream, freed)
            block = self._new_segment(pool, size, stream)
        if block is None:  # test_after_out_of_memory_the_allocator_still_works
            self.stats.num_ooms += 1
            if self.listener is not None:
                self._tell(AllocatorAction.OOM, 0, size, stream)
            message = out_of_memory(
                asked=nbytes,
                total=self.total_bytes,
                free=self.device.free_bytes,
                outside=self.total_bytes - self.device.capacity_bytes,
                allocated=self.stats.allocated_bytes,
                reserved=self.stats.reserved_bytes,
            )
            raise SimOutOfMemoryError(message)
        return block

    def _new_segment(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Return a block from the driver, or None if there is no room."""
        if self.conf.expandable_segments:
            reserved = self.stats.reserved_bytes
            block = self._expandable.allocate(pool, size, stream)
            mapped = self.stats.reserved_bytes - reserved
            if mapped and self.listener is not None:
                where = block.address if block is not None else 0
                self._tell(AllocatorAction.SEGMENT_MAP, where, mapped, stream)
            return block
        nbytes = segment_size(size)
        if self.stats.reserved_bytes + nbytes > self._limit:
            return None
        address = self.device.allocate(nbytes)
        if address is None:
            return None
        block = Block(address, nbytes, stream, pool)
        self.stats.segment(pool.is_small, 1, nbytes)
        self.stats.num_device_alloc += 1
        if nbytes >= self.conf.max_split_bytes:
            self.stats.oversize_segments.increase(1)
        if self.listener is not None:
            self._tell(AllocatorAction.SEGMENT_ALLOC, address, nbytes, stream)
        return block

    def _release_segment(self, block: Block, pool: BlockPool) -> int:
        """Return a free block, which is a whole segment, to the driver; return its size in bytes."""
        pool.remove(block)
        self.device.release(block.size)
        self.stats.segment(pool.is_small, -1, -block.size)
        self.stats.num_device_free += 1
        if block.size >= self.conf.max_split_bytes:
            self.stats.oversize_segments.increase(-1)
        if self.listener is not None:
            self._tell(AllocatorAction.SEGMENT_FREE, block.address, block.size, block.stream)
        return block.size

    def _release_oversize_blocks(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Release as many cached blocks above max_split_size as needed; return whether they suffice."""
        chosen, enough = oversize_to_release(pool, size, stream, self.conf.max_split_bytes)
        for block in chosen:
            self._release_segment(block, pool)
        return enough

    def _release_cached_blocks(self) -> int:
        """Wait for all outstanding events and release all unsplit cached blocks; return their bytes."""
        self.stats.num_sync_all_streams += 1
        pending, self._pending = self._pending, {}
        for stream in sorted(pending):
            for ready_ns, block in pending[stream]:
                self.device.wait_until(ready_ns)
                self._event_passed(block)
        freed = 0
        for pool in (self.large_pool, self.small_pool):
            for block in pool.spare_blocks():
                if block.expandable is not None:
                    released = self._expandable.release(block, pool)
                    if released and self.listener is not None:
                        self._tell(AllocatorAction.SEGMENT_UNMAP, block.address, released, block.stream)
                    freed += released
                elif not block.is_split:  # test_split_segments_cannot_be_given_back
                    freed += self._release_segment(block, pool)
        return freed

    def _record_events(self, block: Block) -> None:
        """Record an event on each other stream: the time when that stream has passed the current point."""
        streams = sorted(block.stream_uses or ())
        block.stream_uses = None
        block.event_count = len(streams)
        for stream in streams:
            self._clock.advance_cpu(self.costs.event_ns)
            queue = self._pending.get(stream)
            if queue is None:
                queue = self._pending[stream] = deque()
            queue.append((self._clock.stream_ready_ns(stream), block))

    def _process_events(self) -> None:
        """Free blocks whose events have passed, checking each stream's events oldest first."""
        clock = self._clock
        now = clock.cpu_ns()
        for queue in self._pending.values():
            if not queue[0][0] > now:
                break
        else:  # no event has passed: one query per stream
            clock.advance_cpu(len(self._pending) * self.costs.event_ns)
            return
        queries = 0
        for stream in list(self._pending):
            queue = self._pending[stream]
            while queue:
                queries += 1
                if queue[0][0] > now:
                    break
                self._event_passed(queue.popleft()[1])
            if not queue:
                del self._pending[stream]
        clock.advance_cpu(queries * self.costs.event_ns)

    def _event_passed(self, block: Block) -> None:
        block.event_count -= 1
        if block.event_count == 0:
            self._free_block(block)

    def _free_block(self, block: Block) -> None:
        """Merge an unused block with its free neighbours and put the result into the pool."""
        if self._risen:
            self.stats.note_peaks()
            self._risen = False
        size = block.size
        small = block.pool.is_small
        pool = self.small_pool if small else self.large_pool
        counters = self.stats.small if small else self.stats.large
        counters.active -= 1
        counters.active_freed += 1
        counters.active_bytes -= size
        counters.active_bytes_freed += size
        counters.requested_bytes -= block.requested
        counters.requested_bytes_freed += block.requested
        del self.active_blocks[block.address]
        if self.listener is not None and self.tells_completion:
            self._tell(AllocatorAction.FREE_COMPLETED, block.address, size, block.stream)

        merged_blocks = merged_bytes = 0
        # Checked before the call: most neighbours are in use.
        before, after = block.prev, block.next
        if before is not None and not before.allocated and (grown := merge(block, before, pool)):
            merged_blocks, merged_bytes = 1, grown
        if after is not None and not after.allocated and (grown := merge(block, after, pool)):
            merged_blocks += 1
            merged_bytes += grown
        pool.insert(block)
        if block.expandable is None:
            split = block.prev is not None or block.next is not None
            count = (1 if split else 0) - merged_blocks
            nbytes = (block.size if split else 0) - merged_bytes
            if count or nbytes:
                self.stats.inactive_split(small, count, nbytes)

    def _tell(self, action: AllocatorAction, address: int, size: int, stream: int, freed: int = 0) -> None:
        assert self.listener is not None
        stats = self.stats
        allocated = stats.small.allocated_bytes + stats.large.allocated_bytes
        reserved, now = stats.reserved_bytes, self._clock.cpu_ns()
        self.listener(AllocatorEvent(action, address, size, stream, allocated, reserved, now, freed))


def _expandable_size(block: Block) -> int:
    """Return a free block's size in bytes, plus the unmapped addresses that follow it."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def out_of_memory(*, asked: int, total: int, free: int, outside: int, allocated: int, reserved: int) -> str:
    """Return torch's message; arguments in bytes. `outside`: memory of the process outside the allocator."""
    inside = (allocated, reserved - allocated)
    sizes = map(format_size, (asked, total, free, outside + reserved, *inside))
    return error_text("caching.out_of_memory", *sizes)


def format_size(nbytes: int) -> str:
    """Format a number of bytes as in torch's messages: `512 bytes`, `2.00 KiB`, `1.50 GiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
