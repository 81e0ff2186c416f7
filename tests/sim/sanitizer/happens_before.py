"""The truth that the sanitizer is held against: a graph of what a program asks for, searched pair by pair.

Nothing of the sanitizer is used. Nodes are accesses, events and moments of the CPU; edges say what comes
before. A program races if two accesses share bytes, one of them writes, and no path leads from the first to
the second.

    CPU      h0 ──> h1 ──> h2 ──> ...          one node an action
    stream   h1 ──> access ──> event ──> ...   a launch comes after its moment
"""

from __future__ import annotations

from dataclasses import dataclass, field

Interval = tuple[int, int]


@dataclass
class Access:
    """One use of memory: its node, bytes, whether it writes, and by which owner of the bytes."""

    node: int
    intervals: tuple[Interval, ...]
    writes: bool
    owner: int


@dataclass
class HappensBefore:
    """Built action by action, in the order of the program."""

    before: list[tuple[int, ...]] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    # By owner: nodes of the events that its memory waited for before it was handed out again.
    released: dict[int, list[int]] = field(default_factory=dict)
    _host: int = -1
    _streams: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._host = self._node()

    def _node(self, *before: int) -> int:
        self.before.append(tuple(node for node in before if node >= 0))
        return len(self.before) - 1

    def _on_stream(self, stream: int, *before: int) -> int:
        self._host = self._node(self._host)
        self._streams[stream] = self._node(self._host, self._streams.get(stream, -1), *before)
        return self._streams[stream]

    def access(self, stream: int, intervals: tuple[Interval, ...], writes: bool, owner: int) -> None:
        """A kernel is launched."""
        self.accesses.append(Access(self._on_stream(stream), intervals, writes, owner))

    def record(self, stream: int) -> int:
        """An event is recorded; its node."""
        self._host = self._node(self._host)
        return self._node(self._host, self._streams.get(stream, -1))

    def wait(self, stream: int, event: int) -> None:
        """A stream waits for an event."""
        self._on_stream(stream, event)

    def wait_on_host(self, *events: int) -> None:
        """The CPU waits for events."""
        self._host = self._node(self._host, *events)

    def free(self, owner: int, streams: set[int]) -> None:
        """Memory is given back that ``record_stream`` keeps for streams."""
        self.released[owner] = [self.record(stream) for stream in sorted(streams)]

    def races(self) -> list[tuple[Access, Access]]:
        """All pairs that nothing orders."""
        reach: list[set[int]] = []  # all nodes before a node; edges lead forwards, so one pass is enough
        for before in self.before:
            found: set[int] = set(before)
            for node in before:
                found |= reach[node]
            reach.append(found)
        return [
            (old, new)
            for index, new in enumerate(self.accesses)
            for old in self.accesses[:index]
            if (old.writes or new.writes)
            and old.node not in reach[new.node]
            and _share(old.intervals, new.intervals)
            and not self._was_waited_for(old, new, reach)
        ]

    def _was_waited_for(self, old: Access, new: Access, reach: list[set[int]]) -> bool:
        """Whether the allocator has waited for the old owner's access before it handed the bytes out."""
        if old.owner == new.owner:
            return False
        return any(old.node in reach[event] for event in self.released.get(old.owner, ()))


def _share(first: tuple[Interval, ...], second: tuple[Interval, ...]) -> bool:
    return any(a < d and c < b for a, b in first for c, d in second)
