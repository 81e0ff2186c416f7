"""Happens-before: what is done for certain when the next work of a stream starts.

Each stream, and the CPU, counts the work that it starts (an *epoch*) and keeps a vector clock: how much of
everybody's work is done for certain by then. Clocks are taken when work is *enqueued*, and passed on by what
the program asked for, never by what merely happened in this timing::

    stream 0   [optimizer writes a]  record(e)        clock of e: stream 0 at 7
    stream 1            wait(e)  [all-gather reads a]  knows stream 0 at 7: ordered, whatever the times

An access of epoch n by agent s is ordered before work whose clock says at least n for s.

Source of the idea: vector clocks (Mattern, Fidge) with epochs (FastTrack, PLDI 2009).
"""

from __future__ import annotations

HOST = 0
"""The CPU among the agents; stream n is agent n + 1."""

Clock = list[int]


class Clocks:
    """The vector clocks of the CPU and of all streams. A clock is a list by agent; what it lacks counts 0."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = [[0]]
        # How often the CPU's clock has grown, and which of that each stream has seen at its last launch.
        self._host_version = 1
        self._seen = [0]

    @property
    def host(self) -> Clock:
        """What the CPU knows to be done."""
        return self._clocks[HOST]

    def of_stream(self, stream: int) -> Clock:
        """What is done for certain when the newest work of a stream starts."""
        agent = stream + 1
        clocks = self._clocks
        while len(clocks) <= agent:
            clocks.append([0] * (len(clocks) + 1))
            self._seen.append(0)
        return clocks[agent]

    def start(self, stream: int) -> int:
        """The CPU launches work on a stream: what it knows is done by then. Returns the work's epoch."""
        mine = self._launch(stream)
        agent = stream + 1
        mine[agent] += 1
        return mine[agent]

    def start_on_host(self) -> int:
        """The CPU touches memory itself. Returns the epoch."""
        self._host_version += 1
        host = self._clocks[HOST]
        host[HOST] += 1
        return host[HOST]

    def record(self, stream: int) -> Clock:
        """The clock of an event that is recorded on a stream now."""
        return list(self._launch(stream))

    def wait(self, stream: int, clock: Clock) -> bool:
        """A stream waits for an event; whether that orders anything again."""
        mine = self._launch(stream)
        return _join(mine, clock)

    def wait_on_host(self, clock: Clock) -> bool:
        """The CPU waits for an event; whether that orders anything again."""
        grew = _join(self._clocks[HOST], clock)
        if grew:
            self._host_version += 1
        return grew

    def wait_for_all(self) -> bool:
        """The CPU waits for all streams; whether that orders anything again."""
        grew = False
        for stream in range(len(self._clocks) - 1):
            grew = self.wait_on_host(self._clocks[stream + 1]) or grew
        return grew

    def _launch(self, stream: int) -> Clock:
        mine = self.of_stream(stream)
        agent = stream + 1
        if self._seen[agent] != self._host_version:
            self._seen[agent] = self._host_version
            _join(mine, self._clocks[HOST])
        return mine


def is_ordered(agent: int, epoch: int, clock: Clock) -> bool:
    """Whether an access is ordered before work with this clock."""
    return agent < len(clock) and clock[agent] >= epoch


def _join(mine: Clock, other: Clock) -> bool:
    """The later of both, in place; whether it grew."""
    grew = False
    if len(other) > len(mine):
        mine.extend([0] * (len(other) - len(mine)))
    for agent, epoch in enumerate(other):
        if epoch > mine[agent]:
            mine[agent] = epoch
            grew = True
    return grew
