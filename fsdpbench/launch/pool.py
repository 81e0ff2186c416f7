"""Runs points in parallel, each in a process forked from a server that has imported torch.

A point that exceeds its timeout is killed with all its processes. If a point dies without a result, its
result is written here, from its ranks' records.

The timeout counts the time that a configuration's processes used. Time in which a process is ready to run but
waits for a processor (on a busy machine) does not count; sleeping and waiting for files or locks does. Linux
reports this per process; on other systems all time counts.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fsdpbench.base import interruption
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.files.shared_log import SharedLog
from fsdpbench.base.reading import MIB, read_tail
from fsdpbench.engine.results.records import STEPS_FILE, Status, read_records
from fsdpbench.engine.results.result import Outcome, outcome_of_records, record_result
from fsdpbench.engine.results.store import result_in
from fsdpbench.launch import fork_server
from fsdpbench.launch.nodes import Nodes
from fsdpbench.launch.point import ASK, run_point, timestamp
from fsdpbench.launch.verdict import how_it_ended, innermost_frame
from fsdpbench.reports.result import Result

_FULL_DISK_BYTES = 1 << 20
_GRACE_S = 15.0
"""Seconds after its own timeout that a point has to write its result before it is killed."""
_ANSWER_S = 0.5
_PATIENCE_S = 30.0
"""Seconds without activity after which a point reports what it waits for."""
_MOST = 10.0
"""A configuration ends after this many times its timeout, however busy the machine is."""
_IDLE = 0.05
"""The share of a processor below which a process counts as idle."""


@dataclass(frozen=True)
class Reading:
    """Seconds used by a process group: sum of time on processors, and the longest wait for a processor."""

    at: float
    processor_s: float
    queued_s: float


@dataclass(frozen=True)
class PointState:
    """The progress of a running configuration. `steps`: in words; `waits`: what it waits for, if anything."""

    config: Config
    processor_s: float
    steps: str | None
    waits: str | None


class UsedTime:
    """The time used by the process group of `leader`, from now on."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._began = time.monotonic()
        self._busy = Reading(self._began, 0.0, 0.0)

    def used_s(self) -> float:
        """Return the seconds that count towards the timeout."""
        took = time.monotonic() - self._began
        return max(took - self._read().queued_s, took / _MOST)

    def idle_s(self) -> float:
        """Return the seconds since a process last used a processor or waited for one."""
        now, last = self._read(), self._busy
        active = now.processor_s - last.processor_s + max(0.0, now.queued_s - last.queued_s)
        if active > max(0.2, _IDLE * (now.at - last.at)) or now.processor_s < last.processor_s:
            self._busy = now
        return now.at - self._busy.at

    def processor_s(self) -> float:
        """Return the processor time of the running processes."""
        return self._read().processor_s

    def _read(self) -> Reading:
        processor, queued = 0.0, 0.0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(process.name)) != self._leader:
                    continue
                running, waiting, _ = (process / "schedstat").read_text().split()
            except (OSError, ValueError):
                continue  # the process has ended, or the system does not report this
            processor += int(running) / 1e9
            queued = max(queued, int(waiting) / 1e9)
        return Reading(time.monotonic(), processor, queued)


@dataclass
class _Running:
    config: Config
    folder: Path
    process: Any
    began: float
    started: str
    used: UsedTime


class PointPool:
    """Runs up to `jobs` points at a time. A context manager: leaving it kills what still runs."""

    environment: Mapping[str, str] | None = None
    """The environment of points; None: that of the fork server."""

    def __init__(self, jobs: int, nodes: Nodes | None = None, analysed: str | None = None) -> None:
        """With `nodes`, this machine leads others that `follow` it. `analysed`: log of analysed traces."""
        self.jobs = jobs
        self._nodes = nodes
        self._analysed = analysed
        self._context = fork_server.context()
        self._running: list[_Running] = []
        self._unwinding = interruption.unwinding()
        self._shared = SharedLog()

    def __enter__(self) -> "PointPool":
        self._unwinding.__enter__()
        self._shared.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if interruption.arrived():
            fork_server.kill()  # also kills a point that is just being started
        for point in self._running:
            _kill(point)
        self._running.clear()
        self._shared.__exit__(*exc_info)
        self._unwinding.__exit__(*exc_info)

    @property
    def running(self) -> list[Config]:
        return [point.config for point in self._running]

    @property
    def has_room(self) -> bool:
        return len(self._running) < self.jobs

    def states(self) -> list[PointState]:
        """Return the progress of each running point."""
        return [_state_of(point) for point in self._running if point.process.is_alive()]

    def start(self, config: Config, folder: Path) -> None:
        """Start `config`; its files go to `folder`, which must exist."""
        try:
            server = fork_server.ensure()
            process = self._context.Process(
                target=run_point,
                args=(
                    *(config.to_dict(), str(folder), self._nodes, server, self._shared.path, self._analysed),
                    self.environment,
                ),
                name=config.name,
            )
            with fork_server.plain_main():
                process.start()
        except EOFError:
            # An uncaught EOFError would be mistaken for an interruption.
            raise BenchError(error_text("pool.no_server")) from None
        used = UsedTime(process.pid or 0)
        self._running.append(_Running(config, folder, process, time.monotonic(), timestamp(), used))

    def finished(self, wait_s: float) -> Iterator[tuple[Config, Path, Result]]:
        """Yield points that ended within `wait_s` seconds, each with its folder and result."""
        wait([point.process.sentinel for point in self._running], timeout=wait_s)
        for point in list(self._running):
            if point.process.is_alive():
                limit_s = point.config.measurement.timeout_s
                if time.monotonic() - point.began < limit_s or point.used.used_s() <= limit_s + _GRACE_S:
                    continue
                place = _place(point)
                _kill(point)
                cause = f"ran past {limit_s:g} s{place}"
                outcome = Outcome(Status.TIMEOUT, cause, "stderr.log")
                self._running.remove(point)
                yield point.config, point.folder, _late_result(point, outcome)
                continue
            point.process.join()
            self._running.remove(point)
            yield point.config, point.folder, _result_of(point)


def _place(point: _Running) -> str:
    """Ask a process for its stacks and return where it is; empty if it does not answer."""
    if not point.config.in_one_process:
        return ""  # its ranks have dumped their stacks at the timeout (`elastic.py`)
    with contextlib.suppress(ProcessLookupError):
        os.kill(point.process.pid, ASK)
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until:
        if place := innermost_frame(read_tail(point.folder / "stderr.log", MIB)):
            return f": stood in {place}"
        time.sleep(0.02)
    return ""


def _state_of(point: _Running) -> PointState:
    done = read_tail(point.folder / STEPS_FILE, 100).split()
    idle = point.used.idle_s()
    place = _place(point) if idle > _PATIENCE_S else ""
    waits = f"has done nothing for {idle:.0f} s{place}" if place else None
    return PointState(point.config, point.used.processor_s(), " ".join(done) or None, waits)


def _result_of(point: _Running) -> Result:
    if (result := result_in(point.folder)) is not None:
        return result  # otherwise it died before or while writing
    outcome = outcome_of_records(read_records(point.folder), world_recorded=1)
    if outcome.status in (Status.OK, Status.CRASH):
        outcome = Outcome(Status.CRASH, _how_it_died(point), "stderr.log")
    return _late_result(point, outcome)


def _late_result(point: _Running, outcome: Outcome) -> Result:
    took = time.monotonic() - point.began
    if (point.folder / "files.open.json").exists():  # its files with tensors were not moved to the folder yet
        from fsdpbench.script.files.overlay import settle_after_death

        settle_after_death(point.folder)
    try:
        free = shutil.disk_usage(point.folder).free
        if outcome.status is not Status.OK and free < _FULL_DISK_BYTES:
            cause = f"the disk is full ({free >> 10} KiB free): {outcome.cause}"
            outcome = Outcome(Status.ERROR, cause, outcome.log)
        return record_result(point.config, point.folder, outcome, took, point.started)
    except OSError as error:
        # Nothing was recorded; the caller finds no result in the folder.
        message = f"the result cannot be written: {error.strerror or error}"
        return Result.of({"status": Status.ERROR.value, "cause": {"message": message, "log": None}})


def _how_it_died(point: _Running) -> str:
    lines = read_tail(point.folder / "stderr.log", MIB).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    how = how_it_ended(point.process.exitcode)
    return f"the process ended early ({how})" + (f": {last}" if last else "")


def _kill(point: _Running) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(point.process.pid, signal.SIGKILL)
    point.process.kill()
    point.process.join(timeout=10)
