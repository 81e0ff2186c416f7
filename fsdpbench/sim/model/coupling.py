"""One simulated time for several ranks, each in a process of its own.

Ranks that do different work (the stages of a pipeline) meet at messages and collectives. A rank says when it
arrives at a *meeting*; that is over when its last member has arrived. Until then the rank may settle its own
events only as far as no other rank can end a meeting before (the conservative rule of Chandy, Misra and
Bryant, with one exchange in the middle, so that nobody asks in circles):

    rank 0   ....[ kernel ]....arrives at 40 ...waits                    its bound: 70, then 90
    rank 1   .......[ kernel at 70 ][ kernel at 90 ] arrives at 110      meeting over at 111, on both

Each rank tells the exchange the time of its own next event. The smallest of the others' is the *bound*. The
nanosecond by which a meeting ends after its last arrival keeps the order of events independent of which
process is faster. A rank that has nothing to wait for runs on without asking.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpbench.sim.model.timeline import Meeting

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Key = tuple[Any, ...]


class StageError(RuntimeError):
    """Other ranks ended, wait in a circle, or call something else."""


class NeedsRanksError(BaseException):
    """Ranks that do not run are needed. Not an `Exception`: scripts shall not catch it."""

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(f"ranks {', '.join(map(str, sorted(ranks)))} are needed")
        self.ranks = frozenset(ranks)


class Arrival(NamedTuple):
    """What one rank brings to a meeting of `members`. `said` must be the same on all of them; `words` say
    to people for what it waits; `payload` is for the others."""

    key: Key
    members: tuple[int, ...]
    said: tuple[Any, ...] = ()
    words: str = ""
    payload: Any = None


class Link:
    """This rank's connection to the exchange; without one it is alone, and asks for others by raising.

    `ranks` are those that run, this one among them. `bound`: the time up to which no other rank ends a
    meeting.
    """

    def __init__(self, rank: int, ranks: Collection[int], connection: Connection | None = None) -> None:
        self.rank = rank
        self.ranks = frozenset(ranks)
        self.bound = 0
        self._connection = connection
        self._waiting: dict[Key, Meeting] = {}

    @property
    def waits(self) -> bool:
        """Return whether this rank is in a meeting that is not over."""
        return bool(self._waiting)

    @property
    def named(self) -> str:
        """Return the ranks that run, in words."""
        return ", ".join(map(str, sorted(self.ranks)))

    def represents(self, rank: int) -> int:
        """Return the rank that runs in the place of `rank`: of evenly spaced ones that of the same stage."""
        ranks = sorted(self.ranks)
        if rank in self.ranks or len(ranks) == 1:
            return rank if rank in self.ranks else self.rank
        stride = ranks[1] - ranks[0]
        return ranks[rank // stride % len(ranks)]

    def members(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return those of `ranks` that run."""
        return tuple(rank for rank in sorted(self.ranks) if rank in ranks)

    def need(self, ranks: Collection[int]) -> None:
        """Have `ranks` run too: everything starts again with them."""
        if self._connection is not None:
            self._connection.send(("need", tuple(ranks)))
            self._connection.recv()
        raise NeedsRanksError(ranks)

    def arrive(self, meeting: Meeting, next_ns: int) -> None:
        """Say that this rank has arrived at a meeting, and waits; `next_ns`: its next own event."""
        for arrival in meeting.arrivals:
            self._waiting[arrival.key] = meeting
            self._send("arrive", arrival, meeting.since, next_ns, True)
        self.bound = min(self.bound, meeting.since)

    def leave(self, arrival: Arrival, now: int) -> None:
        """Arrive and go on: a message that is kept for its reader."""
        self._send("arrive", arrival, now, 0, False)

    def hear(self, next_ns: int) -> list[Meeting]:
        """Wait until another rank has ended a meeting, or none can before `next_ns`; return those over.

        Raises `StageError` if that never happens.
        """
        self._send("wait", next_ns)
        self.bound, over, error = self._receive()
        if error is not None:
            raise StageError(error)
        done = []
        for key, at, payloads in over:
            meeting = self._waiting.pop(key)
            meeting.payloads[key] = payloads
            meeting.at, meeting.left = max(meeting.at, at), meeting.left - 1
            if not meeting.left:
                done.append(meeting)
        return done

    def show(self, key: Key, value: Any) -> None:
        """Leave a value for the ranks that `look` for it."""
        self._send("show", key, value)

    def look(self, key: Key, ranks: Collection[int], now: int) -> dict[int, Any] | None:
        """Return what `ranks` show, once they have; None if they could only after this rank has gone on.

        Takes no simulated time: this rank's next event is `now`.
        """
        self._send("look", key, tuple(ranks), now)
        found: dict[int, Any] | None = self._receive()
        return found

    def end(self, how: str) -> None:
        """Say that this rank has ended."""
        if self._connection is not None:
            self._send("end", how)

    def _send(self, *message: Any) -> None:
        assert self._connection is not None
        self._connection.send(message)

    def _receive(self) -> Any:
        assert self._connection is not None
        return self._connection.recv()
