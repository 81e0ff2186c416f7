"""Shadow memory: the last accesses to each byte, the check of new accesses, and vector clocks.

It tracks addresses, not tensors, so views, `set_`, `resize_` and reuse need no special cases. An allocated
block has a `BlockShadow`: disjoint cells in order of address, each with its last write and the reads since
then::

    block   | cell: written by k7, read by k9 | cell: written by all-gather |        |
    freed   v
    past    | k7, k9                          | all-gather                  |          kept by address

When the allocator reuses these bytes, the new owner's first access must be ordered after the old owner's
accesses, which `Cell.past` holds until then. Accesses that the CPU knows to be complete are ordered before
everything else and are dropped.
"""

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

from fsdpbench.sim.followers.sanitizer.regions import overlap
from fsdpbench.sim.torch_device.followed import Region

Stack = tuple[tuple[CodeType, int], ...]
"""Frames, innermost first: the code object and the index of its instruction."""

_DEEPEST = 120


class Operation:
    """A kernel, a copy, a collective or an access by the CPU; one object for all tensors of a call.

    `agent`, `epoch`: see `Clocks`. `scopes`: profiler spans around the operation, outermost first. `node`:
    the sequence number of the running autograd node in backward, -1 elsewhere. `collective`: whether this is
    a collective that its caller has to wait for.
    """

    __slots__ = ("agent", "collective", "epoch", "in_backward", "name", "node", "scopes", "stack", "step")

    def __init__(self, agent: int, epoch: int, name: str, stack: Stack) -> None:
        self.agent = agent
        self.epoch = epoch
        self.name = name
        self.stack = stack
        self.scopes: tuple[str, ...] = ()
        self.step = 0
        self.node = -1
        self.in_backward = False
        self.collective = False


class Stacks:
    """Python stacks, deduplicated: a training loop has few different ones."""

    def __init__(self) -> None:
        self._known: dict[Stack, Stack] = {}

    def here(self, skip: int) -> Stack:
        """Return the caller's stack, without its `skip` innermost frames."""
        frame: FrameType | None = sys._getframe(skip + 1)
        found: list[tuple[CodeType, int]] = []
        while frame is not None and len(found) < _DEEPEST:
            found.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        stack = tuple(found)
        return self._known.setdefault(stack, stack)


Conflict = Callable[[Operation, bool, Operation, bool, int, bool], None]
"""Called with the old operation, whether it wrote, the new operation, whether it writes, the number of shared
bytes, and whether the bytes had another owner at the old access."""

_MOST_STRIDED = 1024
"""Maximum number of accesses to regions with holes (a loop over columns); the oldest are dropped."""


Past = tuple[Operation, bool, Region | None]
"""An access by a former owner: the operation, whether it wrote, and the region (None: everywhere)."""


class Cell:
    """Bytes with the same history. `past`: accesses by former owners."""

    __slots__ = ("end", "past", "reads", "start", "write")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.write: Operation | None = None
        self.reads: dict[int, Operation] = {}
        self.past: list[Past] = []

    def cut(self, at: int) -> "Cell":
        """Cut this cell at an address; return the part behind it as a new cell."""
        rest = Cell(at, self.end)
        rest.write, rest.reads, rest.past = self.write, dict(self.reads), list(self.past)
        self.end = at
        return rest

    def history(self, host: "Clock") -> list[Past]:
        """Return the newest read and write of each agent, except those that the CPU knows to be complete."""
        found: list[Past] = [*self.past, *((read, False, None) for read in self.reads.values())]
        if self.write is not None:
            found.append((self.write, True, None))
        newest: dict[tuple[int, bool, Region | None], Operation] = {}
        for old, wrote, where in found:
            if not is_ordered(old.agent, old.epoch, host):
                known = newest.get((old.agent, wrote, where))
                if known is None or known.epoch < old.epoch:
                    newest[old.agent, wrote, where] = old
        return [(old, wrote, where) for (_, wrote, where), old in newest.items()][-_MOST_STRIDED:]


class BlockShadow:
    """Access history of one block or host tensor, from address `start` to `end`."""

    __slots__ = ("cells", "end", "start", "starts", "strided")

    def __init__(self, start: int, end: int, cells: Iterable[Cell] = ()) -> None:
        self.start = start
        self.end = end
        self.cells: list[Cell] = list(cells)
        self.starts = [cell.start for cell in self.cells]
        # Accesses to regions with holes: (region, operation, whether it wrote).
        self.strided: list[tuple[Region, Operation, bool]] = []

    def access(self, region: Region, new: Operation, writes: bool, clock: "Clock", report: Conflict) -> None:
        """Record that `new` reads or writes a region of addresses; report its conflicts."""
        if self.strided:
            self._meet_strided(region, new, writes, clock, report)
        if region.runs is not None:
            for cell in self._overlapping(region.start, region.end):
                shared = overlap(region, Region(cell.start, cell.end))
                if shared:
                    _check(cell, new, writes, clock, report, shared, region)
            self._keep_strided(region, new, writes, clock)
            return
        for cell in self._covering(region.start, region.end):
            _check(cell, new, writes, clock, report, cell.end - cell.start, Region(cell.start, cell.end))
            if writes:
                cell.write = new
                if cell.reads:
                    cell.reads = {}
                if cell.past:
                    cell.past = []
            else:
                cell.reads[new.agent] = new
        if writes:
            self._join(region.start, region.end)

    def _overlapping(self, start: int, end: int) -> list[Cell]:
        first = max(bisect_right(self.starts, start) - 1, 0)
        return [
            cell
            for cell in self.cells[first : bisect_left(self.starts, end)]
            if cell.start < end and start < cell.end
        ]

    def _covering(self, start: int, end: int) -> list[Cell]:
        """Return cells that cover exactly these bytes; split cells at the edges and fill gaps."""
        starts = self.starts
        index = bisect_left(starts, start)
        if index < len(starts) and starts[index] == start and self.cells[index].end == end:
            return [self.cells[index]]
        for edge in (start, end):
            index = bisect_left(starts, edge)
            if index and (before := self.cells[index - 1]).end > edge:
                self._insert(before.cut(edge))
        index = bisect_left(starts, start)
        found, position = [], start
        while position < end:
            cell = self.cells[index] if index < len(self.cells) else None
            if cell is None or cell.start > position:
                cell = Cell(position, end if cell is None else min(cell.start, end))
                self._insert(cell)
            found.append(cell)
            position = cell.end
            index += 1
        return found

    def _insert(self, cell: Cell) -> None:
        index = bisect_left(self.starts, cell.start)
        self.starts.insert(index, cell.start)
        self.cells.insert(index, cell)

    def _join(self, start: int, end: int) -> None:
        """Merge the cells that one operation has written."""
        first, last = bisect_left(self.starts, start), bisect_left(self.starts, end)
        if last - first > 1:
            self.cells[first].end = end
            del self.cells[first + 1 : last], self.starts[first + 1 : last]

    def _meet_strided(
        self, region: Region, new: Operation, writes: bool, clock: "Clock", report: Conflict
    ) -> None:
        kept = []
        for entry in self.strided:
            where, old, wrote = entry
            if (writes or wrote) and not is_ordered(old.agent, old.epoch, clock):
                shared = overlap(region, where)
                if shared:
                    report(old, wrote, new, writes, shared, False)
            elif writes and region.runs is None and region.start <= where.start and where.end <= region.end:
                continue  # the new write replaces this access
            kept.append(entry)
        self.strided = kept

    def _keep_strided(self, region: Region, new: Operation, writes: bool, clock: "Clock") -> None:
        kept = [
            entry
            for entry in self.strided
            if not (
                entry[0] == region
                and entry[2] <= writes
                and is_ordered(entry[1].agent, entry[1].epoch, clock)
            )
        ]
        if len(kept) >= _MOST_STRIDED:
            del kept[: _MOST_STRIDED // 8]
        self.strided = [*kept, (region, new, writes)]

    def forget_ordered(self, clock: "Clock") -> None:
        """Drop accesses that are ordered before `clock`."""
        for cell in self.cells:
            cell.past = [each for each in cell.past if not is_ordered(each[0].agent, each[0].epoch, clock)]
            cell.reads = {k: v for k, v in cell.reads.items() if not is_ordered(v.agent, v.epoch, clock)}
            if cell.write is not None and is_ordered(cell.write.agent, cell.write.epoch, clock):
                cell.write = None
        self.strided = [each for each in self.strided if not is_ordered(each[1].agent, each[1].epoch, clock)]

    def leave(self, host: "Clock") -> list[Cell]:
        """Return the accesses that the next owner of the bytes has to be ordered after."""
        left = []
        for cell in self.cells:
            history = cell.history(host)
            if history:
                kept = Cell(cell.start, cell.end)
                kept.past = history
                left.append(kept)
        if self.strided:
            whole = BlockShadow(self.start, self.end, left)
            for region, old, wrote in self.strided:
                if not is_ordered(old.agent, old.epoch, host):
                    for cell in whole._covering(region.start, region.end):
                        cell.past.append((old, wrote, region))
            left = whole.cells
        return left


class FreedMemory:
    """Accesses by former owners to bytes that are free now, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: dict[int, Cell] = {}

    def add(self, cells: Iterable[Cell]) -> None:
        """Add the cells of a freed block."""
        for cell in cells:
            insort(self._starts, cell.start)
            self._cells[cell.start] = cell

    def take(self, start: int, end: int) -> list[Cell]:
        """Remove and return the accesses to bytes that are allocated again."""
        starts = self._starts
        if not starts:
            return []
        first = bisect_left(starts, start)
        if first and self._cells[starts[first - 1]].end > start:
            self.add([self._cells[starts[first - 1]].cut(start)])
            first = bisect_left(starts, start)
        last = bisect_left(starts, end, first)
        if last > first and self._cells[starts[last - 1]].end > end:
            self.add([self._cells[starts[last - 1]].cut(end)])
        found = [self._cells.pop(where) for where in starts[first:last]]
        del starts[first:last]
        return found

    def forget_ordered(self, start: int, end: int, clock: "Clock") -> None:
        """Drop accesses that `clock`, from a passed event, orders."""
        left = []
        for cell in self.take(start, end):
            cell.past = [each for each in cell.past if not is_ordered(each[0].agent, each[0].epoch, clock)]
            if cell.past:
                left.append(cell)
        self.add(left)


def _check(
    cell: Cell, new: Operation, writes: bool, clock: "Clock", report: Conflict, shared: int, touched: Region
) -> None:
    """Report a cell's accesses that are not ordered before `new`, which uses `shared` bytes of the cell."""
    old = cell.write
    if old is not None and not is_ordered(old.agent, old.epoch, clock):
        report(old, True, new, writes, shared, False)
    if writes and cell.reads:
        for read in cell.reads.values():
            if not is_ordered(read.agent, read.epoch, clock):
                report(read, False, new, writes, shared, False)
    if cell.past:
        for old, wrote, where in cell.past:
            if (writes or wrote) and not is_ordered(old.agent, old.epoch, clock):
                both = shared if where is None else overlap(where, touched)
                if both:
                    report(old, wrote, new, writes, both, True)


HOST = 0
"""The agent number of the CPU; stream n is agent n + 1."""

Clock = list[int]


class Clocks:
    """Happens-before order: vector clocks of the CPU and all streams (lists by agent; missing entries: 0).

    Each agent counts the work that it starts (its *epoch*). Its clock holds, for each agent, the epoch up to
    which work is certainly complete. Clocks are taken when work is *enqueued*. They spread only by requested
    synchronization, never by the order of events in this timing::
        stream 0   [optimizer writes a]  record(e)        clock of e: stream 0 at 7
        stream 1            wait(e)  [all-gather reads a]  knows stream 0 at 7: ordered, whatever the times
    An access with epoch n by agent s is ordered before work whose clock has at least n for s. Sources: vector
    clocks (Mattern, Fidge), epochs (FastTrack, PLDI 2009).
    """

    def __init__(self) -> None:
        self._clocks: list[Clock] = [[0]]
        # Version of the CPU's clock, and the version that each stream saw at its last launch.
        self._host_version = 1
        self._seen = [0]

    @property
    def host(self) -> Clock:
        """Return the clock of work that the CPU knows to be complete."""
        return self._clocks[HOST]

    def of_stream(self, stream: int) -> Clock:
        """Return the clock of work that is complete when a stream's newest work starts."""
        agent = stream + 1
        clocks = self._clocks
        while len(clocks) <= agent:
            clocks.append([0] * (len(clocks) + 1))
            self._seen.append(0)
        return clocks[agent]

    def start(self, stream: int) -> int:
        """Launch work on a stream, after all work that the CPU knows to be complete; return its epoch."""
        mine = self._launch(stream)
        agent = stream + 1
        mine[agent] += 1
        return mine[agent]

    def start_on_host(self) -> int:
        """Start an access by the CPU; return its epoch."""
        self._host_version += 1
        host = self._clocks[HOST]
        host[HOST] += 1
        return host[HOST]

    def record(self, stream: int) -> Clock:
        """Return the clock of an event that is recorded on a stream now."""
        return list(self._launch(stream))

    def wait(self, stream: int, clock: Clock) -> bool:
        """Make a stream wait for an event; return whether that orders more work."""
        mine = self._launch(stream)
        return join(mine, clock)

    def wait_on_host(self, clock: Clock) -> bool:
        """Make the CPU wait for an event; return whether that orders more work."""
        grew = join(self._clocks[HOST], clock)
        if grew:
            self._host_version += 1
        return grew

    def wait_for_all(self) -> bool:
        """Make the CPU wait for all streams; return whether that orders more work."""
        grew = False
        for stream in range(len(self._clocks) - 1):
            grew = self.wait_on_host(self._clocks[stream + 1]) or grew
        return grew

    def _launch(self, stream: int) -> Clock:
        mine = self.of_stream(stream)
        agent = stream + 1
        if self._seen[agent] != self._host_version:
            self._seen[agent] = self._host_version
            join(mine, self._clocks[HOST])
        return mine


def is_ordered(agent: int, epoch: int, clock: Clock) -> bool:
    """Return whether an access is ordered before work with this clock."""
    return agent < len(clock) and clock[agent] >= epoch


def join(mine: Clock, other: Clock) -> bool:
    """Set `mine` to the element-wise maximum of both clocks; return whether it grew."""
    grew = False
    if len(other) > len(mine):
        mine.extend([0] * (len(other) - len(mine)))
    for agent, epoch in enumerate(other):
        if epoch > mine[agent]:
            mine[agent] = epoch
            grew = True
    return grew
