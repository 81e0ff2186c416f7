"""Decides how a configuration with several processes ended, and which rank's error is the cause.

When one rank fails, the others fail after it: their collectives break, or they are asked to stop. The first
cause is searched in this order:

    ran past the timeout        timeout: where each rank stood
    out of memory on any rank   oom
    a rank died without a message  crash: not stopped by us, no record; by its signal or exit code (0 and
                                SIGTERM: after other ranks' own errors)
    an error of its own         error: the earliest that is not a broken connection to another rank
    a broken connection         error: the earliest

In addition to its record, each rank writes its logs, and its stacks if it is stopped:

    FOLDER/logs/  rank0_stdout.log  rank0_stderr.log  rank0_stopped.txt  rank0_error.json ...

`rank{r}_stopped.txt` has the stacks of a rank that was asked to end. A rank that wrote neither a record nor
stacks was not asked: it died by itself.
"""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.reading import read_tail
from fsdpbench.base.writing import append_to
from fsdpbench.engine.results.records import Status, record_path
from fsdpbench.engine.results.result import Outcome
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
LOG_FOLDER = "logs"
_TAIL_BYTES = 1 << 16


class RankFiles:
    """Paths of one rank's files in a configuration's folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        begin = f"{LOG_FOLDER}/rank{rank}_"
        self.stdout, self.stderr = folder / f"{begin}stdout.log", folder / f"{begin}stderr.log"
        self.stopped, self.error = folder / f"{begin}stopped.txt", folder / f"{begin}error.json"

    def error_lines(self) -> list[str]:
        """Return the last non-blank lines of the rank's error log."""
        return [line.strip() for line in read_tail(self.stderr, _TAIL_BYTES).splitlines() if line.strip()]

    def place(self) -> str | None:
        """Return the main thread's innermost frame when the rank was stopped, such as `barrier (x.py:12)`."""
        return innermost_frame(read_tail(self.stopped, _TAIL_BYTES))

    def remove_empty(self) -> None:
        for path in (self.stdout, self.stderr, self.stopped):
            if path.exists() and path.stat().st_size == 0:
                path.unlink()


_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')


_INSTALLED = re.compile(rf"/(?:site|dist)-packages/|<|{re.escape(os.path.dirname(os.__file__))}/")
_OURS = f"{Path(__file__).parents[1]}/"


def innermost_frame(stacks: str) -> str | None:
    """Return the innermost frame of the main thread, which is the last in a `faulthandler` dump, and the
    frame in a file that is not installed from which it was called. If the main thread has no such file,
    because it waits for another thread, return that thread's frames. Frames of this project are skipped.
    """
    _, *threads = stacks.split("(most recent call first):")
    found = [_shown(each) for each in reversed(threads)]
    words = next((each for each, has_own in found if has_own), found[0][0] if found else [])
    return ", from ".join(words) or None


def _shown(thread: str) -> tuple[list[str], bool]:
    """Return the frames of a thread to show, and whether one of them is in a file that is not installed."""
    frames = [match for line in thread.splitlines() if (match := _FRAME.match(line))]
    others = [each for each in frames if not each["file"].startswith(_OURS)]
    own = [each for each in others if not _INSTALLED.search(each["file"])]
    shown = dict.fromkeys([*(others if own else frames)[:1], *own[:1]])
    return [f"{each['function']} ({Path(each['file']).name}:{each['line']})" for each in shown], bool(own)


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a process ended; None: unknown exit code."""
    if exit_code is None:
        return "died without a message"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def log_to(folder: Path) -> None:
    """Redirect this process's output to the logs in `folder`. Raises `FileNotFoundError` if it is gone."""
    for stream, name in ((sys.stdout, "stdout.log"), (sys.stderr, "stderr.log")):
        stream.flush()
        handle = append_to(folder / name)
        os.dup2(handle, stream.fileno())
        os.close(handle)


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
        """Return the first line of the rank's error, from its record or else from its log."""
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
    def how(self) -> str:
        return how_it_ended(self.exit_code)


def judge(
    folder: Path,
    world_size: int,
    records: Sequence[RankRecord],
    exit_codes: Mapping[int, int],
    timed_out_after_s: float | None = None,
) -> Outcome:
    """Return the outcome of a configuration whose ranks have ended. `timed_out_after_s`: None without a
    timeout; `exit_codes`: the known ones, by rank."""
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
    failed = sorted((end for end in ends if end.status is not Status.OK), key=lambda end: _order(folder, end))
    has_own_error = bool(failed) and not _order(folder, failed[0])[0]
    # A signal shows that the rank died by itself; one without an exit code may have been stopped early.
    crashed = [end for end in ends if end.record is None and not read_tail(end.files.stopped, _TAIL_BYTES)]
    # A rank that ended with 0, or as the launcher ends ranks, did not cause another rank's own error.
    crashed = [end for end in crashed if end.exit_code not in (0, -signal.SIGTERM) or not has_own_error]
    if crashed:
        return _crash(min(crashed, key=lambda end: (end.exit_code is None, end.rank)))
    if failed:
        return _outcome(Status.ERROR, failed[0], failed[0].cause or failed[0].how)
    return Outcome(Status.OK)


def _outcome(status: Status, end: RankEnd, cause: str) -> Outcome:
    return Outcome(
        status, f"rank {end.rank}: {cause}", end.files.stderr.relative_to(end.files.folder).as_posix()
    )


def _crash(end: RankEnd) -> Outcome:
    cause = f"{end.how}: {end.cause}" if end.cause else end.how
    if end.exit_code == -signal.SIGKILL:
        cause += " (the kernel does so when the machine's memory runs out)"
    if end.exit_code is not None and end.exit_code > 0 and end.cause:
        # An exception before the rank could write a record, for example during imports.
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
