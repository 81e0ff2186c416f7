"""Random programs against a brute-force allocator, and invariants that hold for every setting.

The brute force keeps each segment as a plain list of pieces and scans all of them: slow and obvious.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpbench.sim.model.allocator import AllocatorConf, AllocatorCosts, CachingAllocator, SimOutOfMemoryError
from fsdpbench.sim.model.allocator.expandable import FIRST_ADDRESS

KIB, MIB = 1 << 10, 1 << 20
CAPACITY = 160 * MIB
COSTS = AllocatorCosts(malloc_ns=3000, free_ns=2000, event_ns=10)
FREE, LIVE, PENDING = "free", "live", "pending"


@dataclass
class Piece:
    address: int
    size: int
    state: str = FREE
    uses: set[int] = field(default_factory=set)
    events: int = 0


@dataclass
class Segment:
    small: bool
    stream: int
    pieces: list[Piece]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class BruteForce:
    """The same rules without any index: every question scans every piece."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.segments: list[Segment] = []
        self.events: list[tuple[int, int, Piece]] = []
        self.retries = self.ooms = 0
        self.next_address = FIRST_ADDRESS

    def malloc(self, nbytes: int, stream: int) -> Piece | None:
        self.poll()
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        found = self.best_fit(size, small, stream)
        if found is None:
            found = self.grow(size, small, stream)
        if found is None:
            return None
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if small else rest > MIB:
            at = segment.pieces.index(piece)
            segment.pieces.insert(at + 1, Piece(piece.address + size, rest))
            piece.size = size
        piece.state = LIVE
        return piece

    def best_fit(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        fitting = [
            (piece.size, piece.address, segment, piece)
            for segment in self.segments
            if segment.small == small and segment.stream == stream
            for piece in segment.pieces
            if piece.state == FREE and piece.size >= size
        ]
        return min(fitting, key=lambda item: item[:2])[2:] if fitting else None

    def grow(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.clock.advance_cpu(COSTS.malloc_ns)
        if self.reserved + total > CAPACITY:
            for ready, _, piece in sorted(self.events, key=lambda event: event[1]):
                self.clock.wait_cpu_until(ready)
                self.passed(piece)
            self.events = []
            for segment in list(self.segments):
                if [piece.state for piece in segment.pieces] == [FREE]:
                    self.clock.synchronize_device()
                    self.clock.advance_cpu(COSTS.free_ns)
                    self.segments.remove(segment)
            self.retries += 1
            self.clock.advance_cpu(COSTS.malloc_ns)
            if self.reserved + total > CAPACITY:
                self.ooms += 1
                return None
        segment = Segment(small, stream, [Piece(self.next_address, total)])
        self.next_address += -(-total // (2 * MIB)) * 2 * MIB
        self.segments.append(segment)
        return segment, segment.pieces[0]

    def free(self, piece: Piece) -> None:
        if not piece.uses:
            self.release(piece)
            return
        piece.state, piece.events = PENDING, len(piece.uses)
        for stream in sorted(piece.uses):
            self.clock.advance_cpu(COSTS.event_ns)
            self.events.append((self.clock.stream_ready_ns(stream), stream, piece))
        piece.uses = set()

    def poll(self) -> None:
        now, blocked, queries = self.clock.cpu_ns(), set(), 0
        for event in list(self.events):
            ready, stream, piece = event
            if stream in blocked:
                continue
            queries += 1
            if ready > now:
                blocked.add(stream)
                continue
            self.events.remove(event)
            self.passed(piece)
        self.clock.advance_cpu(queries * COSTS.event_ns)

    def passed(self, piece: Piece) -> None:
        piece.events -= 1
        if piece.events == 0:
            self.release(piece)

    def release(self, piece: Piece) -> None:
        piece.state = FREE
        segment = next(one for one in self.segments if any(part is piece for part in one.pieces))
        merged: list[Piece] = []
        for part in segment.pieces:
            if merged and merged[-1].state == FREE and part.state == FREE:
                merged[-1].size += part.size
            else:
                merged.append(part)
        segment.pieces = merged

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def stats(self) -> dict[str, int]:
        pieces = [(segment, piece) for segment in self.segments for piece in segment.pieces]
        idle = [piece.size for segment, piece in pieces if piece.state == FREE and len(segment.pieces) > 1]
        live = [piece.size for _, piece in pieces if piece.state == LIVE]
        active = [piece.size for _, piece in pieces if piece.state != FREE]
        return {
            "allocation.all.current": len(live),
            "allocated_bytes.all.current": sum(live),
            "active.all.current": len(active),
            "active_bytes.all.current": sum(active),
            "inactive_split.all.current": len(idle),
            "inactive_split_bytes.all.current": sum(idle),
            "segment.all.current": len(self.segments),
            "segment.small_pool.current": sum(segment.small for segment in self.segments),
            "reserved_bytes.all.current": self.reserved,
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }


SIZES = st.sampled_from(
    [1, 512, 700, 100 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 19 * MIB + 5, 30 * MIB, 61 * MIB]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, 99), st.integers(0, 2)),
        st.tuples(st.just("queue"), st.integers(0, 40_000), st.integers(0, 2)),
        st.tuples(st.just("advance"), st.integers(0, 20_000), st.just(0)),
    ),
    min_size=20,
    max_size=90,
)


@settings(max_examples=80, deadline=None)
@given(steps=STEPS)
def test_every_step_equals_the_brute_force(make_clock, steps):
    clock, other_clock = make_clock(), make_clock()
    allocator = CachingAllocator(CAPACITY, clock, costs=COSTS)
    brute = BruteForce(other_clock)
    live = []
    for action, number, stream in steps:
        if action == "malloc":
            expected = brute.malloc(number, stream)
            if expected is None:
                with pytest.raises(SimOutOfMemoryError):
                    allocator.malloc(number, stream)
            else:
                block = allocator.malloc(number, stream)
                assert (block.address, block.size) == (expected.address, expected.size)
                live.append((block, expected, stream))
        elif action in ("free", "record") and live:
            block, expected, owner = live[number % len(live)]
            if action == "record":
                allocator.record_stream(block, stream)
                expected.uses |= {stream} - {owner}
            else:
                del live[number % len(live)]
                allocator.free(block)
                brute.free(expected)
        elif action == "queue":
            clock.queue(stream, number)
            other_clock.queue(stream, number)
        elif action == "advance":
            clock.advance_cpu(number)
            other_clock.advance_cpu(number)
        stats = allocator.memory_stats()
        wanted = brute.stats()
        assert {key: stats[key] for key in wanted} == wanted
        assert clock.now == other_clock.now


CONFIGURATIONS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:21",
    "max_split_size_mb:21,expandable_segments:True",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9",
]


@pytest.mark.parametrize("text", CONFIGURATIONS)
@settings(max_examples=20, deadline=None)
@given(steps=STEPS)
def test_invariants_hold_for_every_setting(make_clock, text, steps):
    clock = make_clock()
    allocator = CachingAllocator(CAPACITY, clock, AllocatorConf.parse(text), costs=COSTS)
    live, peaks = [], {}
    for action, number, stream in steps:
        if action == "malloc":
            try:
                live.append(allocator.malloc(number, stream))
            except SimOutOfMemoryError:
                assert allocator.memory_stats()["num_ooms"] > 0
        elif action == "record" and live:
            allocator.record_stream(live[number % len(live)], stream)
        elif action == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif action == "queue":
            clock.queue(stream, number)
        else:
            clock.advance_cpu(number if action == "advance" else 0)
        check_invariants(allocator, live, peaks)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    stats = allocator.memory_stats()
    for name in (
        "allocated_bytes",
        "active_bytes",
        "reserved_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    ):
        assert stats[f"{name}.all.current"] == 0
    assert allocator.device.used_bytes == 0


def check_invariants(allocator: CachingAllocator, live: list, peaks: dict[str, int]) -> None:
    ranges = sorted((block.address, block.address + block.size) for block in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.current"] == sum(block.size for block in live)
    assert stats["requested_bytes.all.current"] >= sum(block.requested for block in live)
    assert stats["reserved_bytes.all.current"] == allocator.device.used_bytes <= CAPACITY
    for name in ("allocation", "allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes"):
        for pool in ("all", "small_pool", "large_pool"):
            current, peak = stats[f"{name}.{pool}.current"], stats[f"{name}.{pool}.peak"]
            assert stats[f"{name}.{pool}.allocated"] - stats[f"{name}.{pool}.freed"] == current
            peaks[name + pool] = max(peaks.get(name + pool, 0), current)
            assert current <= peaks[name + pool] <= peak
        both = stats[f"{name}.small_pool.current"] + stats[f"{name}.large_pool.current"]
        assert both == stats[f"{name}.all.current"]
    allocated, active = stats["allocated_bytes.all.current"], stats["active_bytes.all.current"]
    assert allocated <= active <= stats["reserved_bytes.all.current"]
    free = [block for pool in (allocator.small_pool, allocator.large_pool) for block in pool.blocks()]
    assert sum(block.size for block in free) + active == stats["reserved_bytes.all.current"]
    for block in free:
        following = block.next
        assert following is None or following.allocated or following.event_count or not following.mapped
