"""The ranks of a pipeline: one process for each, and the exchange at which they meet.

point process ──┬── rank 0 here. It meets point-to-point: the ranks that it names are needed
                └── standby, forked before, runs them all from the start
                      ├── rank 0 ──┐
                      ├── rank 4 ──┴── meetings, bounds and values: `sim/model/coupling.py`
                      └── …  a rank that names further ones: again, with these

<configuration>/  trace/rank0_record.json, rank4_record.json …  traces beside them
  ranks/rank4/    stdout.log  stderr.log
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.interruption import die_with_parent
from fsdpbench.base.writing import remove
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import TRACE_FOLDER, Status, read_records
from fsdpbench.engine.results.result import Outcome, outcome_of_records
from fsdpbench.launch.rank_check import folder_of
from fsdpbench.launch.verdict import how_it_ended, log_to
from fsdpbench.sim.model.coupling import Arrival, Key, Link, NeedsRanksError
from fsdpbench.sim.model.timeline import NEVER

MOST_RANKS = 64
"""Ranks that run at most: each is a process with a copy of the script."""
_FORK = multiprocessing.get_context("fork")


@dataclass
class _Rank:
    """A rank as the exchange knows it. `next_ns`: no event of it comes before. `waits` for `hear`, `looks` at
    values; `over`: meetings that ended, still to be told."""

    process: ForkProcess
    connection: Connection
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

    def answer(self, content: Any) -> None:
        self.waits, self.looks, self.over = False, None, []
        with contextlib.suppress(OSError):  # it has died, which its process says
            self.connection.send(content)


class Exchange:
    """The meetings of all ranks."""

    def __init__(self, ranks: dict[int, _Rank]) -> None:
        self._ranks = ranks
        self._arrived: dict[Key, dict[int, tuple[int, Arrival]]] = {}
        self._shown: dict[Key, dict[int, Any]] = {}

    def take(self, rank: int, message: tuple[Any, ...]) -> None:
        """Take a message of a rank, and answer whom that lets go on. Raises `NeedsRanksError`."""
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
        """Answer all ranks that may go on. If none can, and none is running, they wait in a circle."""
        alive = {rank: one for rank, one in self._ranks.items() if one.ended is None}
        for rank, one in alive.items():
            bound = min((each.next_ns for other, each in alive.items() if other != rank), default=NEVER)
            if one.waits and (one.over or one.error or bound >= one.next_ns < NEVER):
                one.answer((bound, one.over, one.error))
            elif one.looks is not None:
                key, ranks = one.looks
                shown = self._shown.get(key, {})
                if all(each in shown for each in ranks):
                    one.answer({each: shown[each] for each in ranks})
        if any(not one.waits and one.looks is None for one in alive.values()):
            return
        looking = next((one for one in alive.values() if one.looks is not None), None)
        if looking is not None:
            looking.answer(None)
            return
        stuck = "; ".join(self._stuck())
        for one in alive.values():
            one.answer((NEVER, [], stuck))

    def _stuck(self) -> Iterator[str]:
        """Yield for what each rank waits that can never be."""
        for rank, one in self._ranks.items():
            for key, arrival in one.meetings.items():
                missing = [each for each in arrival.members if each not in self._arrived.get(key, {})]
                gone = [each for each in missing if self._ranks[each].ended is not None]
                why = f", and rank {gone[0]} {self._ranks[gone[0]].ended}" if gone else ""
                yield f"rank {rank} waits for rank {missing[0]}: {arrival.words}{why}"

    def waits_of_all(self) -> str:
        """Return for what the ranks wait now, in words."""
        return "; ".join(self._stuck())


class Standby:
    """A process that was forked before the script began, and runs the ranks of a pipeline if there is one."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_stand_by, args=(config, folder, theirs, os.getpid()))
        self._process.start()
        theirs.close()

    def run(self, ranks: Collection[int]) -> Outcome:
        """Run `ranks`, and those that they need; return how they ended."""
        self._connection.send(sorted(ranks))
        try:
            outcome: Outcome = self._connection.recv()
        except EOFError:
            outcome = Outcome(Status.CRASH, "the process of the pipeline's ranks ended", "stderr.log")
        self._process.join()
        return outcome

    def dismiss(self) -> None:
        """End it: the script has no pipeline."""
        self._process.kill()
        self._process.join()


def _stand_by(config: Config, folder: Path, connection: Connection, parent: int) -> None:
    die_with_parent(parent)
    ranks = frozenset(connection.recv())
    while True:
        try:
            connection.send(_run_all(config, folder, ranks))
        except NeedsRanksError as error:
            ranks |= error.ranks
            continue
        except Exception as error:
            traceback.print_exc()
            connection.send(Outcome(Status.ERROR, f"{type(error).__name__}: {error}", "stderr.log"))
        os._exit(0)


def _run_all(config: Config, folder: Path, ranks: Collection[int]) -> Outcome:
    """Run `ranks` once. Raises `NeedsRanksError` if that is not all."""
    if len(ranks) > MOST_RANKS:
        text = f"a pipeline of more than {MOST_RANKS} ranks that differ is not simulated"
        return Outcome(Status.ERROR, f"NotImplementedError: {text}", "stderr.log")
    for name in ("stdout.log", "stderr.log"):
        os.truncate(folder / name, 0)  # of the attempt before
    remove(folder / TRACE_FOLDER)
    running = {rank: _start(config, folder, rank, tuple(sorted(ranks))) for rank in sorted(ranks)}
    exchange = Exchange(running)
    try:
        _listen(exchange, running)
    finally:
        for one in running.values():
            one.process.kill()
            one.process.join()
    records = read_records(folder)
    found = {record.rank: record for record in records}
    for rank, one in running.items():
        if rank not in found:
            how = how_it_ended(one.process.exitcode or 0)
            return Outcome(Status.CRASH, f"rank {rank}: the process ended early, {how}", _log_of(rank))
    # Ranks that only missed another one say nothing of the cause.
    causes = [record for record in records if "StageError" not in (record.cause or "")]
    failed = any(record.status is not Status.OK for record in causes)
    outcome = outcome_of_records(causes if failed else records, world_recorded=0)
    rank = next((each.rank for each in records if outcome.cause == f"rank {each.rank}: {each.cause}"), 0)
    return Outcome(outcome.status, outcome.cause, outcome.log and _log_of(rank))


def _log_of(rank: int) -> str:
    return "stderr.log" if rank == 0 else f"{folder_of(Path(), rank)}/stderr.log"


def _listen(exchange: Exchange, running: dict[int, _Rank]) -> None:
    """Take the ranks' messages until all have ended."""
    by_connection = {one.connection: rank for rank, one in running.items()}
    by_sentinel: dict[Any, int] = {one.process.sentinel: rank for rank, one in running.items()}
    while by_sentinel:
        for ready in wait([*by_connection, *by_sentinel]):
            if isinstance(ready, Connection):
                try:
                    exchange.take(by_connection[ready], ready.recv())
                except (EOFError, OSError):
                    del by_connection[ready]
            elif running[by_sentinel[ready]].connection not in by_connection:
                exchange.end(by_sentinel.pop(ready), "died")


def _start(config: Config, folder: Path, rank: int, ranks: tuple[int, ...]) -> _Rank:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_run_rank, args=(config, folder, rank, ranks, theirs, os.getpid()))
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _run_rank(
    config: Config, folder: Path, rank: int, ranks: tuple[int, ...], connection: Connection, parent: int
) -> None:
    """One rank, in a process of its own, which ends here."""
    code = 1
    try:
        die_with_parent(parent)
        from fsdpbench.script.rank import run_script

        own = folder_of(folder, rank)
        own.mkdir(parents=True, exist_ok=True)
        log_to(own)
        link = Link(rank, ranks, connection)
        placement = Placement(rank, config.gpus, rank % config.ranks_per_node)
        status = run_script(config, placement, folder, link=link, own=own)
        link.end("has ended" if status is Status.OK else f"ended with {status.value}")
        code = 0
    except NeedsRanksError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
