"""The ranks of a pipeline: one process each, and the exchange through which they communicate.

point process ──┬── rank 0 here. When it uses point-to-point communication, the ranks it names are needed
                └── standby, forked before, runs them all from the start
                      ├── rank 0 ──┐
                      ├── rank 4 ──┴── meetings, bounds and values: `sim/model/coupling.py`
                      └── …  if a rank names further ones: all again, with these

<configuration>/  trace/rank0_record.json, rank4_record.json …  traces beside them
  ranks/rank4/    stdout.log  stderr.log
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import msgspec

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.interruption import die_with_parent
from fsdpbench.base.result_sections import PlaceholderDecision
from fsdpbench.base.writing import remove
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import TRACE_FOLDER, RankRecord, Status, read_records, write_record
from fsdpbench.engine.results.result import Outcome, outcome_of_records
from fsdpbench.launch.rank_check import folder_of
from fsdpbench.launch.verdict import how_it_ended, log_to
from fsdpbench.script.rank import Exchange, Link, Member, NeedsRanksError, run_script

MOST_RANKS = 64  # each rank is a process with a copy of the script
_FORK = multiprocessing.get_context("fork")


class Standby:
    """A process forked before the script begins. It runs the ranks of a pipeline if the script has one."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_stand_by, args=(config, folder, theirs, os.getpid()))
        self._process.start()
        theirs.close()

    def run(self, ranks: Collection[int]) -> Outcome:
        """Run `ranks` and further ranks that they need; return the outcome."""
        self._connection.send(sorted(ranks))
        try:
            outcome: Outcome = self._connection.recv()
        except EOFError:
            outcome = Outcome(Status.CRASH, "the process of the pipeline's ranks ended", "stderr.log")
        self._process.join()
        return outcome

    def dismiss(self) -> None:
        """End the process, because the script has no pipeline."""
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
    """Run `ranks` once. Raises `NeedsRanksError` if they need further ranks."""
    if len(ranks) > MOST_RANKS:
        return Outcome(Status.ERROR, f"more than {MOST_RANKS} ranks that differ are not simulated")
    for name in ("stdout.log", "stderr.log"):
        os.truncate(folder / name, 0)  # remove output of the previous attempt
    remove(folder / TRACE_FOLDER)
    running = {rank: _start(config, folder, rank, tuple(sorted(ranks))) for rank in sorted(ranks)}
    try:
        _listen(running)
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()
    records = read_records(folder)
    found = {record.rank: record for record in records}
    for rank, (process, _) in running.items():
        if rank not in found:
            how = how_it_ended(process.exitcode or 0)
            return Outcome(Status.CRASH, f"rank {rank}: the process ended early, {how}", _log_of(rank))
    _note(records, folder)
    # Ranks that failed only because another one was missing do not know the cause.
    causes = [record for record in records if "StageError" not in (record.cause or "")]
    failed = any(record.status is not Status.OK for record in causes)
    outcome = outcome_of_records(causes if failed else records, world_recorded=0)
    rank = next((each.rank for each in records if outcome.cause == f"rank {each.rank}: {each.cause}"), 0)
    return Outcome(outcome.status, outcome.cause, outcome.log and _log_of(rank))


def _note(records: Sequence[RankRecord], folder: Path) -> None:
    """Add notes and decisions of the other ranks to the record of rank 0, which becomes the result."""
    first, *others = records
    peaks = [
        max((step["reserved"] or 0 for step in each.memory_per_step or ()), default=0) for each in records
    ]
    each_peak = ", ".join(
        f"rank {each.rank} {peak / 2**30:.1f} GiB" for each, peak in zip(records, peaks, strict=True)
    )
    if first.script is not None:
        ran = f"{len(records)} ranks ran, as stages of a pipeline"
        first.script.notes.append(f"{ran}; reserved at the peak: {each_peak}")
    found = {_place_of(each): each for record in records for each in record.placeholder_decisions or ()}
    first.placeholder_decisions = list(found.values())
    for each in others:
        first.unknown_operators = each.unknown_operators | first.unknown_operators
        remove(folder_of(folder, each.rank) / "files")  # may be as large as real checkpoints
    write_record(first, folder)


def _place_of(decision: PlaceholderDecision) -> PlaceholderDecision:
    """Return a decision without its count, which differs between ranks."""
    return msgspec.structs.replace(decision, count=0)


def _log_of(rank: int) -> str:
    return "stderr.log" if rank == 0 else f"{folder_of(Path(), rank)}/stderr.log"


_Running = tuple[ForkProcess, Connection]


def _listen(running: Mapping[int, _Running]) -> None:
    """Process the ranks' messages until all ranks have ended."""
    exchange = Exchange({rank: Member(connection) for rank, (_, connection) in running.items()})
    by_connection = {connection: rank for rank, (_, connection) in running.items()}
    by_sentinel: dict[Any, int] = {process.sentinel: rank for rank, (process, _) in running.items()}
    while by_sentinel:
        for ready in wait([*by_connection, *by_sentinel]):
            if isinstance(ready, Connection):
                try:
                    exchange.take(by_connection[ready], ready.recv())
                except (EOFError, OSError):
                    del by_connection[ready]
            elif by_sentinel[ready] not in by_connection.values():
                exchange.end(by_sentinel.pop(ready), "died")


def _start(config: Config, folder: Path, rank: int, ranks: tuple[int, ...]) -> _Running:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_run_rank, args=(config, folder, rank, ranks, theirs, os.getpid()))
    process.start()
    theirs.close()
    return process, ours


def _run_rank(
    config: Config, folder: Path, rank: int, ranks: tuple[int, ...], connection: Connection, parent: int
) -> None:
    """Run one rank in its own process, and end the process."""
    code = 1
    try:
        die_with_parent(parent)
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
