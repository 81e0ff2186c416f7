"""Runs the points of a plan that its store does not hold yet, and keeps what comes back."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fsdpbench.config import Config
from fsdpbench.errors import BenchError
from fsdpbench.index import build_index
from fsdpbench.launch.pool import PointPool
from fsdpbench.provenance import content_key
from fsdpbench.records import Status
from fsdpbench.store import INDEX_FILE, Store

_POLL_S = 0.5


class Progress(Protocol):
    """Told what happens, in order; prints it for people."""

    def begin(self, total: int, already_done: int) -> None: ...
    def started(self, config: Config) -> None: ...
    def finished(self, config: Config, result: dict[str, Any]) -> None: ...
    def tick(self) -> None: ...
    def end(self) -> None: ...


@dataclass
class SweepSummary:
    """How many points were found done, and the results of those that ran now."""

    already_done: int
    ran: list[tuple[Config, dict[str, Any]]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(not Status(result["status"]).is_answer for _, result in self.ran)


def jobs_for(device: str) -> int:
    """Simulated points run side by side on all cores; real ones would disturb each other."""
    if device != "sim":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_sweep(
    store: Store,
    points: Sequence[Config],
    progress: Progress,
    *,
    jobs: int,
    retry_failed: bool = False,
    fail_fast: bool = False,
) -> SweepSummary:
    """Run what is missing of `points`. Interrupted, it loses only what was in flight; call it again to go
    on."""
    done = store.finished()
    todo = deque(
        config
        for config in points
        if (stored := done.get(content_key(config))) is None
        or (retry_failed and not Status(stored.result["status"]).is_answer)
    )
    summary = SweepSummary(already_done=len(points) - len(todo))
    progress.begin(len(points), summary.already_done)
    try:
        with PointPool(jobs) as pool:
            for config, result in _drain(store, pool, todo, progress):
                summary.ran.append((config, result))
                if fail_fast and not Status(result["status"]).is_answer:
                    break
    finally:
        progress.end()
        build_index(store.folder / INDEX_FILE, store.points())
    return summary


def _drain(
    store: Store, pool: PointPool, todo: deque[Config], progress: Progress
) -> Iterator[tuple[Config, dict[str, Any]]]:
    while todo or pool.running:
        while todo and pool.has_room:
            config = todo.popleft()
            with _disk_errors(store.folder):
                pool.start(config, store.work_folder(config))
            progress.started(config)
        for config, work, result in pool.finished(_POLL_S):
            with _disk_errors(store.folder):
                store.commit(config, work)
            progress.finished(config, result)
            yield config, result
        progress.tick()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise BenchError(
            f"{folder}: cannot be written ({error.strerror or error}; {free >> 20} MiB free). "
            f"What is finished is kept: start the same command again to go on."
        ) from None
