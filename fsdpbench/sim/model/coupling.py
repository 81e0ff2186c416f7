"""One simulated time for several ranks, each in a process of its own.

Ranks that do different work (the stages of a pipeline) meet at messages and collectives. A rank says when it
arrives at a *meeting*; that is over when its last member has arrived. Until then the rank may settle its own
events only as far as no other rank can end a meeting before (the conservative rule of Chandy, Misra and
Bryant, through one exchange):

    rank 0   ....[ kernel ]....arrives at 40 ...waits                    its bound: 70, then 90
    rank 1   .......[ kernel at 70 ][ kernel at 90 ] arrives at 110      meeting over at 111, on both

Each rank tells the exchange the time of its own next event. The smallest of the others' is the *bound*. The
nanosecond by which a meeting ends after its last arrival keeps the order of events independent of which
process is faster. A rank that has nothing to wait for runs on without asking.
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
    """Other ranks ended, wait in a circle, or call something else."""


class NeedsRanksError(BaseException):
    """Other ranks have to run. Not an `Exception`: scripts shall not catch it."""

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(ranks)
        self.ranks = frozenset(ranks)

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, sorted(self.ranks)))} are needed"


class Arrival(NamedTuple):
    """One rank's part of a meeting of `members`. `said` must be the same on all of them; `words` say
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

    def __init__(self, rank: int, ranks: Collection[int], connection: Any = None) -> None:
        self.rank = rank
        self.ranks = frozenset(ranks)
        self.bound = 0
        self._connection = connection
        self._waiting: dict[Key, Meeting] = {}

    @property
    def waits(self) -> bool:
        """Return whether this rank is in a meeting that is not over."""
        return bool(self._waiting)

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
        for arrival in meeting.arrivals:  # and maybe elsewhere at the same time
            self._waiting[arrival.key] = meeting
            self._connection.send(("arrive", arrival, meeting.since, min(next_ns, meeting.since), True))
        self.bound = min(self.bound, meeting.since)

    def leave(self, arrival: Arrival, now: int) -> None:
        """Arrive and continue: a message that is kept for its reader."""
        self._connection.send(("arrive", arrival, now, 0, False))

    def hear(self, next_ns: int) -> list[Meeting]:
        """Wait until another rank has ended a meeting, or none can before `next_ns`; return those over.

        Raises `StageError` if that never happens.
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
        """Leave a value for the ranks that `look` for it."""
        self._connection.send(("show", key, value))

    def look(self, key: Key, ranks: Collection[int], now: int) -> dict[int, Any] | None:
        """Return what `ranks` show, once they have; None if they could only after this rank has continued.

        Takes no simulated time: this rank's next event is `now`.
        """
        self._connection.send(("look", key, tuple(ranks), now))
        found: dict[int, Any] | None = self._connection.recv()
        return found

    def end(self, how: str) -> None:
        """Say that this rank has ended."""
        self._connection.send(("end", how))


@dataclass
class Member:
    """A rank as the exchange knows it. `next_ns`: no event of it comes before. `waits`: in `hear`;
    `looks`: at values; `over`: meetings that ended since its last answer."""

    connection: "Connection"
    next_ns: int = 0
    waits: bool = False
    looks: tuple[Key, tuple[int, ...]] | None = None
    ended: str | None = None
    meetings: dict[Key, Arrival] = field(default_factory=dict)
    over: list[tuple[Key, int, dict[int, Any]]] = field(default_factory=list)
    error: str | None = None

    def will(self, next_ns: int) -> None:
        """Note its next event, which a meeting that is over may bring forward."""
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
        with contextlib.suppress(OSError):  # it has died, which its process says
            self.connection.send(content)


class Exchange:
    """The meetings of all ranks."""

    def __init__(self, ranks: Mapping[int, Member]) -> None:
        self._ranks = ranks
        self._arrived: dict[Key, dict[int, tuple[int, Arrival]]] = {}
        self._shown: dict[Key, dict[int, Any]] = {}

    def take(self, rank: int, message: tuple[Any, ...]) -> None:
        """Take a `message` of a `rank`, and answer those that can then continue. Raises `NeedsRanksError`."""
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
        """Note that a rank has ended: nothing comes from it any more."""
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
        """Answer all ranks that can continue. If none can, and none is running, they wait in a circle."""
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
        """Yield for what each rank waits that can never be."""
        for rank, one in self._ranks.items():
            for key, arrival in one.meetings.items():
                missing = [each for each in arrival.members if each not in self._arrived.get(key, {})]
                gone = [each for each in missing if self._ranks[each].ended is not None]
                why = f", and rank {gone[0]} {self._ranks[gone[0]].ended}" if gone else ""
                yield f"rank {rank} waits for rank {missing[0]}: {arrival.words}{why}"
