"""Runs several ranks of one script, one process each, and compares their sequences of collectives.

    point process ──┬── rank 0 alone: measured as without the check, records its collectives and their
    results
                    └── then the other ranks, as many at a time as there are cores; each ends as rank 0 does

    <configuration>/  collectives.pickle  trace/rank0_record.json …      rank 0, as without the check
      ranks/rank3/    collectives.pickle  stdout.log  stderr.log         another rank

All ranks share the configuration's timeout. A rank that exceeds it records its current line.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.files.documents import read_json_object, to_json
from fsdpbench.base.interruption import die_with_parent
from fsdpbench.base.reading import UnreadableError
from fsdpbench.base.writing import remove, write_whole
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.machine_state import usable_cores
from fsdpbench.engine.results.records import Status, read_records, record_path
from fsdpbench.engine.results.result import Outcome, outcome_of_records
from fsdpbench.launch.verdict import how_it_ended, log_to
from fsdpbench.script.rank_check.calls import Ended, RankLog
from fsdpbench.script.rank_check.comparison import Difference, first_difference, group_name, sentence, to_dict

_RANKS = "ranks"
_STOP_GRACE_S = 3.0
"""Seconds between asking a rank to end and killing it."""


def folder_of(folder: Path, rank: int) -> Path:
    """Return the folder for a rank's files."""
    return folder if rank == 0 else folder / _RANKS / f"rank{rank}"


def run_checked(config: Config, folder: Path) -> Outcome:
    """Run the ranks in the script's `check_ranks` and compare them. Adds the comparison to the record of
    rank 0. Never raises for what a rank does."""
    assert config.script is not None
    deadline = time.monotonic() + config.measurement.timeout_s
    ranks = config.script.check_ranks
    ends = _run_all(config, folder, ranks[:1], deadline)
    outcome = _outcome_of_rank_0(config, folder, ends[0])
    if outcome.status is not Status.TIMEOUT:
        ends |= _run_all(config, folder, ranks[1:], deadline)
        logs = [_log(folder, end) for end in ends.values()]
        difference = first_difference(logs)
        if difference is not None and difference.kind == Ended.TIMEOUT:
            had, took = ends[difference.rank].took_s, ends[ranks[0]].took_s
            if had < took and outcome.status in (Status.OK, Status.RACE):  # it had less time than rank 0
                said = f"rank {difference.rank} had {had:.0f} s of it, and rank 0 took {took:.0f} s"
                limit = f"ran past {config.measurement.timeout_s:g} s"
                difference, outcome = None, Outcome(Status.TIMEOUT, f"{limit}: {said}", "stderr.log")
        _leave(folder, _record(logs, difference))
        outcome = _with_difference(config, outcome, difference)
    for rank in ranks[1:]:
        remove(folder_of(folder, rank) / "files")  # may be as large as real checkpoints
    return outcome


@dataclass(frozen=True)
class _End:
    """How a rank's process ended."""

    rank: int
    exit_code: int
    timed_out: bool
    took_s: float


def _run_all(config: Config, folder: Path, ranks: Sequence[int], deadline: float) -> dict[int, _End]:
    """Run these ranks until they end or the deadline passes."""
    fork = multiprocessing.get_context("fork")
    waiting, running, ends = list(ranks), dict[int, tuple[ForkProcess, float]](), dict[int, _End]()
    while waiting or running:
        while waiting and len(running) < usable_cores():
            rank = waiting.pop(0)
            process = fork.Process(target=_run_rank, args=(config, folder, rank, os.getpid()))
            process.start()
            running[rank] = process, time.monotonic()
        left = deadline - time.monotonic()
        ready = wait([process.sentinel for process, _ in running.values()], max(0.0, left))
        for rank, (process, began) in list(running.items()):
            timed_out = process.sentinel not in ready
            if not timed_out or left <= 0:
                del running[rank]
                code = _ended(process, timed_out=timed_out)
                ends[rank] = _End(rank, code, timed_out, time.monotonic() - began)
    return dict(sorted(ends.items()))


def _ended(process: ForkProcess, *, timed_out: bool) -> int:
    """Wait for a process, after killing it if it timed out; return its exit code."""
    if timed_out:
        process.terminate()
        process.join(_STOP_GRACE_S)
        process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run_rank(config: Config, folder: Path, rank: int, parent: int) -> None:
    """Run one rank in its own process, and end the process."""
    code = 1
    try:
        die_with_parent(parent)
        from fsdpbench.script.rank import run_script

        own = folder_of(folder, rank)
        if rank:
            own.mkdir(parents=True, exist_ok=True)
            log_to(own)
            steps = config.measurement
            timed = steps.timed_steps + steps.traced_steps  # as many steps as rank 0, but no trace
            config = replace(
                config, sanitize=False, measurement=replace(steps, timed_steps=timed, traced_steps=0)
            )
        local = rank % config.ranks_per_node
        run_script(config, Placement(rank, config.gpus, local), own, rank_0=folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _outcome_of_rank_0(config: Config, folder: Path, end: _End) -> Outcome:
    if end.timed_out:
        stood = _log(folder, end).stood
        where = f": rank 0 stood at {Path(stood[0].file).name}:{stood[0].line}" if stood else ""
        return Outcome(Status.TIMEOUT, f"ran past {config.measurement.timeout_s:g} s{where}", "stderr.log")
    outcome = outcome_of_records(read_records(folder), world_recorded=1)
    if end.exit_code != 0 and outcome.status in (Status.OK, Status.CRASH):
        return Outcome(Status.CRASH, f"rank 0: {_died(end)}", "stderr.log")
    return outcome


def _log(folder: Path, end: _End) -> RankLog:
    """Return the log that a rank wrote, or a log that says how the rank ended if there is none."""
    try:
        log = RankLog.read(folder_of(folder, end.rank))
    except UnreadableError:
        log = RankLog(end.rank, ended=Ended.CRASH, error=_died(end))
    if end.timed_out and log.ended is not Ended.TIMEOUT:
        log.ended, log.error = Ended.TIMEOUT, f"stopped after {end.took_s:.0f} s"
    return log


def _died(end: _End) -> str:
    return f"the process ended early, {how_it_ended(end.exit_code)}"


def _with_difference(config: Config, outcome: Outcome, difference: Difference | None) -> Outcome:
    """Return the difference as the outcome, unless rank 0 failed by itself."""
    if difference is None or outcome.status not in (Status.OK, Status.RACE):
        return outcome
    log = "stderr.log" if difference.rank == 0 else f"{_RANKS}/rank{difference.rank}/stderr.log"
    if difference.kind == Ended.TIMEOUT:
        seconds = f"{config.measurement.timeout_s:g} s"
        return Outcome(Status.TIMEOUT, f"ran past {seconds}: {sentence(difference)}", log)
    is_refused = difference.kind == Ended.REFUSED
    return Outcome(Status.ERROR if is_refused else Status.RANK_MISMATCH, sentence(difference), log)


def _record(logs: Sequence[RankLog], difference: Difference | None) -> dict[str, object]:
    """Return the section `rank_check` of the result."""
    groups: dict[Any, tuple[str, int, Counter[str]]] = {}
    for log in logs:
        for call in log.calls:
            name = "making of groups" if call.kind == "new_group" else group_name(call.group)
            made = (name, len(call.group.ranks), Counter[str]())
            groups.setdefault(call.group.key, made)[2][str(log.rank)] += 1
    return {
        "ranks": [log.rank for log in logs],
        "collectives": {
            "calls": {str(log.rank): len(log.calls) for log in logs},
            "ended": {str(log.rank): log.ended.value for log in logs},
            "groups": [
                {"group": name, "size": n, "calls": dict(calls)} for name, n, calls in groups.values()
            ],
        },
        "difference": None if difference is None else to_dict(difference),
    }


def _leave(folder: Path, record: dict[str, object]) -> None:
    path = record_path(folder, 0)
    try:
        content = read_json_object(path)
    except UnreadableError:
        return  # rank 0 died without a record
    write_whole(path, to_json({**content, "rank_check": record}, 1))
