"""How a configuration of several processes ended, and which rank's word to believe.

When one rank fails, the others fail after it: their collectives break, or they are asked to stop. The first
cause is looked for in this order:

    ran past the timeout        timeout: where each rank stood
    out of memory on any rank   oom
    a rank died without a message  crash: not stopped by us, no record; by its signal or exit code
    an error of its own         error: the earliest that is not the broken connection to another rank
    a broken connection         error: the earliest
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.engine.results.records import Status, record_path
from fsdpbench.engine.results.result import Outcome
from fsdpbench.launch.rank_files import RankFiles, how_it_ended
from fsdpbench.reports.rank_record import RankRecord

_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|^MemoryError|std::bad_alloc"
    r"|Cannot allocate memory|CUDA out of memory|OutOfMemoryError"
)
_BROKEN_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|connectFullMesh|Socket Timeout"
    r"|Application timeout caused pair|remote process exited"
    r"|DistNetworkError|NCCL communicator was aborted|ncclRemoteError"
)
_ERROR_LINE = re.compile(
    r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b|^Fatal Python error|^terminate called|what\(\):"
)


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended: its record if it wrote one, its exit code if it is known (negative: a signal)."""

    rank: int
    record: RankRecord | None
    exit_code: int | None
    files: RankFiles

    @property
    def status(self) -> Status | None:
        return None if self.record is None else self.record.status

    @property
    def cause(self) -> str:
        """Return the first line of its error, of the record or else of its log."""
        if self.record is not None and self.record.cause:
            return self.record.cause
        lines = [line for line in self.files.error_lines() if _ERROR_LINE.search(line)]
        return lines[-1] if lines else ""

    @property
    def out_of_memory(self) -> bool:
        if self.status is Status.OOM:
            return True
        return self.status is not Status.OK and bool(_OUT_OF_MEMORY.search(self.cause))

    @property
    def died_alone(self) -> bool:
        return self.record is None and not self.files.was_stopped()

    @property
    def how(self) -> str:
        return how_it_ended(self.exit_code)


def judge(
    folder: Path,
    world_size: int,
    records: Sequence[RankRecord],
    exit_codes: Mapping[int, int],
    timed_out_after_s: float | None = None,
) -> Outcome:
    """Return the outcome of a configuration whose ranks have ended. `timed_out_after_s`: None unless it did;
    `exit_codes`: by rank, as far as they are known."""
    by_rank = {record.rank: record for record in records}
    ends = [
        RankEnd(rank, by_rank.get(rank), exit_codes.get(rank), RankFiles(folder, rank))
        for rank in range(world_size)
    ]
    if timed_out_after_s is not None:
        return _timeout(ends, timed_out_after_s)
    for end in ends:
        if end.out_of_memory:
            return _outcome(Status.OOM, end, end.cause)
    # A signal is known to be the rank's own end; an unknown one may be a rank that was stopped too early.
    crashed = [end for end in ends if end.died_alone]
    if crashed:
        return _crash(min(crashed, key=lambda end: (end.exit_code is None, end.rank)))
    failed = sorted((end for end in ends if end.status is not Status.OK), key=lambda end: _order(folder, end))
    if failed:
        return _outcome(Status.ERROR, failed[0], failed[0].cause or failed[0].how)
    return Outcome(Status.OK)


def _outcome(status: Status, end: RankEnd, cause: str) -> Outcome:
    return Outcome(status, f"rank {end.rank}: {cause}", end.files.log_name)


def _crash(end: RankEnd) -> Outcome:
    cause = f"{end.how}: {end.cause}" if end.cause else end.how
    if end.exit_code == -signal.SIGKILL:
        cause += " (the kernel does so when the machine's memory runs out)"
    if end.exit_code is not None and end.exit_code > 0 and end.cause:
        # An exception before the rank could write a record (an import, for one).
        return _outcome(Status.ERROR, end, end.cause)
    return _outcome(Status.CRASH, end, cause)


def _timeout(ends: Sequence[RankEnd], seconds: float) -> Outcome:
    stood = [(end, place) for end in ends if (place := end.files.place())]
    places = ", ".join(f"rank {end.rank} stood in {place}" for end, place in stood[:4])
    log = (stood[0][0] if stood else ends[0]).files.stopped
    return Outcome(
        Status.TIMEOUT,
        f"ran past {seconds:g} s" + (f": {places}" if places else ""),
        log.relative_to(ends[0].files.folder).as_posix(),
    )


def _order(folder: Path, end: RankEnd) -> tuple[bool, int, int]:
    path = record_path(folder, end.rank)
    when = path.stat().st_mtime_ns if path.exists() else 0
    return end.record is None or bool(_BROKEN_CONNECTION.search(end.cause)), when, end.rank
