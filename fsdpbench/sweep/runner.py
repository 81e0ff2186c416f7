"""Runs the points of a plan that its store does not hold yet, and keeps what comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fsdpbench import interruption
from fsdpbench.configuration.config import Config
from fsdpbench.launch.pool import PointPool
from fsdpbench.reports.result import Result
from fsdpbench.results.index import refresh_index
from fsdpbench.results.machine_state import usable_cores
from fsdpbench.results.provenance import content_key
from fsdpbench.results.records import Status
from fsdpbench.results.store import Store, disk_errors
from fsdpbench.sweep.repeats import Run, interleaved, merged

_POLL_S = 0.5


class Progress(Protocol):
    """Told what happens, in order; prints it for people. `total` 0: how many there will be is not known."""

    def begin(self, total: int, already_done: int) -> None: ...
    def started(self, config: Config) -> None: ...
    def finished(self, config: Config, result: Result) -> None: ...
    def tick(self) -> None: ...
    def end(self) -> None: ...


class Pool(Protocol):
    """Runs points, each in a folder of its own (`launch.pool` here, `launch.slurm` on a cluster)."""

    @property
    def running(self) -> list[Config]: ...
    @property
    def has_room(self) -> bool: ...
    def start(self, config: Config, folder: Path) -> None: ...
    def finished(self, wait_s: float) -> Iterator[tuple[Config, Path, Result]]: ...
    def __enter__(self) -> Pool: ...
    def __exit__(self, *exc_info: object) -> None: ...


@dataclass
class SweepSummary:
    """How many runs were found done, and the results of those that ran now."""

    already_done: int
    ran: list[tuple[Config, Result]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(not result.status.is_answer for _, result in self.ran)


def jobs_for(device: str) -> int:
    """Simulated points run side by side on all cores; real ones would disturb each other."""
    return usable_cores() if device == "sim" else 1


def run_sweep(
    store: Store,
    points: Sequence[Config],
    progress: Progress,
    *,
    jobs: int,
    retry_failed: bool = False,
    fail_fast: bool = False,
    repeat: int = 1,
    pool: Pool | None = None,
    index: bool = True,
    again: bool = False,
) -> SweepSummary:
    """Run what is missing of `repeat` runs of each of `points`, in `pool` (default: here, `jobs` at a time).

    With `again` all are run, instead of what is there; without `index` the store's index is left as it is.
    Interrupted, it loses only what was in flight; call it
    again to continue. Raises `BenchError` if the store cannot be written any more.
    """
    statuses = store.statuses(points, repeat)
    runs = interleaved(points, repeat)
    todo = deque(
        run
        for run in runs
        if again or (status := statuses.get(_key(run))) is None or (retry_failed and not status.is_answer)
    )
    summary = SweepSummary(already_done=len(runs) - len(todo))
    progress.begin(len(runs), summary.already_done)
    try:
        with pool or PointPool(jobs) as workers:
            for config, result in _drain(store, workers, todo, progress, statuses):
                summary.ran.append((config, result))
                if fail_fast and not result.status.is_answer:
                    break
    finally:
        progress.end()
        with disk_errors(store.folder):
            if repeat > 1:
                _merge_repeats(store, points)
        if index and interruption.arrived():
            store.drop_index()  # it would be of before, and a new one takes longer than there is
        elif index:
            refresh_index(store)
    return summary


def _drain(
    store: Store,
    pool: Pool,
    todo: deque[Run],
    progress: Progress,
    statuses: dict[tuple[str, int], Status],
) -> Iterator[tuple[Config, Result]]:
    numbers: dict[Path, int] = {}
    while todo or pool.running:
        while todo and pool.has_room:
            run = todo.popleft()
            if run.number > 1 and statuses.get((content_key(run.config), 1)) is not Status.OK:
                continue  # what did not work at first has no time to be repeated
            with disk_errors(store.folder):
                work = store.work_folder(run.config, run.number)
                pool.start(run.config, work)
            numbers[work] = run.number
            progress.started(run.config)
        for config, work, result in pool.finished(_POLL_S):
            number = numbers.pop(work)
            with disk_errors(store.folder):
                store.commit(config, work, number)
            statuses[content_key(config), number] = result.status
            progress.finished(config, result)
            yield config, result
        progress.tick()


def _merge_repeats(store: Store, points: Sequence[Config]) -> None:
    """Write each configuration's result over all of its runs that are there."""
    for config in points:
        results = store.runs(config)
        if len(results) > 1 and results[0].status is Status.OK:
            store.replace_result(config, merged(results[0], results[1:]))


def _key(run: Run) -> tuple[str, int]:
    return content_key(run.config), run.number
