"""Shared simulated time for several ranks, each in its own process.

Ranks that do different work (the stages of a pipeline) synchronize in messages and collectives, here called
*meetings*. A rank reports its arrival at a meeting, which ends when its last member has arrived. Until then,
the rank may process its own events only up to the time before which no other rank can end a meeting (the
conservative rule of Chandy, Misra and Bryant, through one exchange):

    rank 0   ....[ kernel ]....arrives at 40 ...waits                    its bound: 70, then 90
    rank 1   .......[ kernel at 70 ][ kernel at 90 ] arrives at 110      meeting over at 111, on both

Each rank sends the exchange the time of its next event. The minimum over the other ranks is the *bound*. A
meeting ends 1 ns after its last arrival, so that the order of events does not depend on which process is
faster. A rank that waits for nothing runs on without contacting the exchange.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpbench.sim.model.timeline import NEVER, Meeting

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Key = tuple[Any, ...]


class StageError(RuntimeError):
    """Other ranks have ended, wait in a cycle, or call something different."""


class NeedsRanksError(BaseException):
    """Signal that other ranks have to run. Not an `Exception`, so that scripts do not catch it."""

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(ranks)
        self.ranks = frozenset(ranks)

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, sorted(self.ranks)))} are needed"


class Arrival(NamedTuple):
    """One rank's arrival at a meeting of `members`. `said` must be equal on all members; `words` describe
    the wait in messages; the other members receive `payload`."""

    key: Key
    members: tuple[int, ...]
    said: tuple[Any, ...] = ()
    words: str = ""
    payload: Any = None


class Link:
    """This rank's connection to the exchange; without one, the rank runs alone and raises to request others.

    `ranks`: the ranks that run, including this one. `bound`: the time before which no other rank ends a
    meeting.
    """

    def __init__(self, rank: int, ranks: Collection[int], connection: Any = None) -> None:
        self.rank = rank
        self.ranks = frozenset(ranks)
        self.bound = 0
        self._connection = connection
        self._waiting: dict[Key, Meeting] = {}

    @property
    def waits(self) -> bool:
        """Return whether this rank waits in a meeting."""
        return bool(self._waiting)

    def represents(self, rank: int) -> int:
        """Return the running rank that represents `rank`: that of its stage if ranks are evenly spaced."""
        ranks = sorted(self.ranks)
        if rank in self.ranks or len(ranks) == 1:
            return rank if rank in self.ranks else self.rank
        stride = ranks[1] - ranks[0]
        return ranks[rank // stride % len(ranks)]

    def members(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return the members of `ranks` that run."""
        return tuple(rank for rank in sorted(self.ranks) if rank in ranks)

    def need(self, ranks: Collection[int]) -> None:
        """Request that `ranks` run too; the simulation restarts with them."""
        if self._connection is not None:
            self._connection.send(("need", tuple(ranks)))
            self._connection.recv()
        raise NeedsRanksError(ranks)

    def arrive(self, meeting: Meeting, next_ns: int) -> None:
        """Report that this rank has arrived at a meeting and waits. `next_ns`: the time of its next event."""
        for arrival in meeting.arrivals:  # possibly several meetings at the same time
            self._waiting[arrival.key] = meeting
            self._connection.send(("arrive", arrival, meeting.since, min(next_ns, meeting.since), True))
        self.bound = min(self.bound, meeting.since)

    def leave(self, arrival: Arrival, now: int) -> None:
        """Arrive without waiting: the exchange keeps the message for its reader."""
        self._connection.send(("arrive", arrival, now, 0, False))

    def hear(self, next_ns: int) -> list[Meeting]:
        """Wait until another rank ends a meeting, or none can before `next_ns`; return the ended meetings.

        Raises `StageError` if that cannot happen.
        """
        self._connection.send(("wait", next_ns))
        self.bound, over, error = self._connection.recv()
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
        """Publish a value for ranks that `look` for it."""
        self._connection.send(("show", key, value))

    def look(self, key: Key, ranks: Collection[int], now: int) -> dict[int, Any] | None:
        """Return the values that `ranks` publish, or None if they wait for this rank to continue.

        Takes no simulated time: `now` counts as this rank's next event.
        """
        self._connection.send(("look", key, tuple(ranks), now))
        found: dict[int, Any] | None = self._connection.recv()
        return found

    def end(self, how: str) -> None:
        """Report that this rank has ended."""
        self._connection.send(("end", how))


@dataclass
class Member:
    """The exchange's state of a rank. `next_ns`: the rank has no earlier event. `waits`: it is in `hear`.
    `looks`: values that it waits for. `over`: meetings that ended since its last answer."""

    connection: "Connection"
    next_ns: int = 0
    waits: bool = False
    looks: tuple[Key, tuple[int, ...]] | None = None
    ended: str | None = None
    meetings: dict[Key, Arrival] = field(default_factory=dict)
    over: list[tuple[Key, int, dict[int, Any]]] = field(default_factory=list)
    error: str | None = None

    def will(self, next_ns: int) -> None:
        """Record the time of its next event; an ended meeting may make it earlier."""
        self.next_ns = min([next_ns, *(at for _, at, _ in self.over)])

    def tell(self, bound: int, error: str | None = None) -> None:
        """Answer `hear`."""
        over, self.over, self.waits = self.over, [], False
        self._send((bound, over, error or self.error))

    def hand(self, found: dict[int, Any] | None) -> None:
        """Answer `look`."""
        self.looks = None
        self._send(found)

    def _send(self, content: Any) -> None:
        with contextlib.suppress(OSError):  # the rank has died, which its process reports
            self.connection.send(content)


class Exchange:
    """Meetings of all ranks."""

    def __init__(self, ranks: Mapping[int, Member]) -> None:
        self._ranks = ranks
        self._arrived: dict[Key, dict[int, tuple[int, Arrival]]] = {}
        self._shown: dict[Key, dict[int, Any]] = {}

    def take(self, rank: int, message: tuple[Any, ...]) -> None:
        """Process a `message` of `rank`; answer ranks that can then continue. Raises `NeedsRanksError`."""
        kind, *content = message
        one = self._ranks[rank]
        if kind == "arrive":
            self._arrive(rank, *content)
        elif kind == "wait":
            one.will(content[0])
            one.waits = True
        elif kind == "show":
            key, value = content
            self._shown.setdefault(key, {})[rank] = value
        elif kind == "look":
            key, ranks, now = content
            one.will(now)
            one.looks = key, ranks
        elif kind == "need":
            raise NeedsRanksError(content[0])
        else:
            self.end(rank, content[0])
        self._answer()

    def end(self, rank: int, how: str) -> None:
        """Record that a rank has ended and will send nothing more."""
        one = self._ranks[rank]
        if one.ended is None:
            one.ended, one.next_ns = how, NEVER
            self._answer()

    def _arrive(self, rank: int, arrival: Arrival, now: int, next_ns: int, awaits: bool) -> None:
        one = self._ranks[rank]
        if awaits:
            one.will(next_ns)
            one.meetings[arrival.key] = arrival
        there = self._arrived.setdefault(arrival.key, {})
        there[rank] = now, arrival
        if len(there) < len(arrival.members):
            return
        del self._arrived[arrival.key]
        others = [each for each in there.values() if each[1].said != arrival.said]
        at = max(time for time, _ in there.values()) + 1
        payloads = {member: each.payload for member, (_, each) in there.items()}
        for member in there:
            each = self._ranks[member]
            if others:
                first = next(who for who, came in there.items() if came[1] is others[0][1])
                calls = f"rank {first}: {others[0][1].words}, but rank {rank}: {arrival.words}"
                each.error = f"{calls}; real ranks would hang here"
            if each.meetings.pop(arrival.key, None) is not None:
                each.over.append((arrival.key, at, payloads))
                each.will(each.next_ns)

    def _answer(self) -> None:
        """Answer all ranks that can continue. If none can and none is running, the ranks are deadlocked."""
        alive = {rank: one for rank, one in self._ranks.items() if one.ended is None}
        for rank, one in alive.items():
            bound = min((each.next_ns for other, each in alive.items() if other != rank), default=NEVER)
            if one.waits and (one.over or one.error or bound >= one.next_ns < NEVER):
                one.tell(bound)
            elif one.looks is not None:
                key, ranks = one.looks
                shown = self._shown.get(key, {})
                if all(each in shown for each in ranks):
                    one.hand({each: shown[each] for each in ranks})
        if any(not one.waits and one.looks is None for one in alive.values()):
            return
        looking = next((one for one in alive.values() if one.looks is not None), None)
        if looking is not None:
            looking.hand(None)
            return
        stuck = f"real ranks would hang here: {'; '.join(self._stuck())}"
        for one in alive.values():
            one.tell(NEVER, stuck)

    def _stuck(self) -> Iterator[str]:
        """Yield, for each waiting rank, what it waits for in vain."""
        for rank, one in self._ranks.items():
            for key, arrival in one.meetings.items():
                missing = [each for each in arrival.members if each not in self._arrived.get(key, {})]
                gone = [each for each in missing if self._ranks[each].ended is not None]
                why = f", and rank {gone[0]} {self._ranks[gone[0]].ended}" if gone else ""
                yield f"rank {rank} waits for rank {missing[0]}: {arrival.words}{why}"
