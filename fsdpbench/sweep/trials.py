"""The one loop over configurations: `run(tasks, pool)` yields a `Trial` for each as it ends.

    tasks ──while the pool has room──> start ──> poll ──> Trial ──> caller

A sweep stores the results (`runner.py`). `simulate` runs configurations in a temporary folder, for forecasts
(`prediction.py`), explanations, advice and the doctor. The pool limits processes and memory (`jobs_for`) and
enforces timeouts; leaving its context kills what still runs.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fsdpbench.base import interruption
from fsdpbench.base.configuration.config import Config, WhatIf
from fsdpbench.base.result_sections import MemoryAccount
from fsdpbench.engine.results.machine_state import available_memory, usable_cores
from fsdpbench.engine.results.records import Status
from fsdpbench.engine.results.store import disk_errors
from fsdpbench.launch.pool import PointPool, PointState
from fsdpbench.reports.result import Interval, Result

_POLL_S = 0.5
_JOB_BYTES = 512 << 20
"""Memory of one simulated configuration in addition to what it shares with the fork server."""
_ROOMY = 256.0
"""A factor for the GPU's memory, to find out how much would be needed and how fast it would be."""


class Pool(Protocol):
    """Runs points, each in its own folder (`launch.pool` on this machine, `launch.slurm` on a cluster)."""

    @property
    def running(self) -> list[Config]: ...
    @property
    def has_room(self) -> bool: ...
    def start(self, config: Config, folder: Path) -> None: ...
    def finished(self, wait_s: float) -> Iterator[tuple[Config, Path, Result]]: ...
    def states(self) -> list[PointState]: ...
    def __enter__(self) -> "Pool": ...
    def __exit__(self, *exc_info: object) -> None: ...


class Progress:
    """Callbacks for events of a run, in order; this class shows nothing. `total` 0: unknown number."""

    def begin(self, total: int, already_done: int) -> None: ...
    def started(self, config: Config) -> None: ...
    def finished(self, config: Config, result: Result) -> None: ...
    def tick(self, states: Callable[[], list[PointState]]) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Trial:
    """A configuration that was tried, and its result. Units: bytes, seconds, samples per second and GPU."""

    config: Config
    result: Result = field(repr=False)
    folder: Path | None = None

    @property
    def status(self) -> Status:
        return self.result.status

    @property
    def cause(self) -> str | None:
        return self.result.message

    @property
    def fits(self) -> bool:
        """Return whether it ran to its end, with or without data races."""
        return self.status in (Status.OK, Status.RACE)

    @property
    def step_time_s(self) -> float | None:
        return self.result.step_time_s

    @property
    def speed(self) -> float | None:
        """Return samples per second and GPU; steps per second for a script, which has no samples."""
        step = self.step_time_s
        return self.result.samples_per_s_per_gpu or (1.0 / step if step else None)

    @property
    def allocated(self) -> int | None:
        """Return the peak bytes of tensors."""
        peaks = self.result.peak_memory_bytes
        return None if peaks is None or peaks.allocated is None else int(peaks.allocated)

    @property
    def reserved(self) -> int | None:
        """Return the peak bytes that the allocator reserved."""
        return None if self.result.reserved is None else int(self.result.reserved)

    @property
    def retries(self) -> float:
        """Return the allocator retries per step."""
        return self.result.alloc_retries_per_step or 0.0

    @property
    def flops(self) -> float | None:
        """Return the model's FLOPs of one step."""
        step, tflops = self.step_time_s, self.result.tflops_per_gpu
        return step * tflops * 1e12 if step and tflops else None

    @property
    def interval(self) -> Interval | None:
        """Return the interval for the real figures; None for real devices, and without a step time."""
        return self.result.interval

    @property
    def risky(self) -> bool:
        """Return whether the memory fits only if the prediction's error is favourable, or with retries."""
        return self.result.is_risky

    @property
    def untrained(self) -> int:
        """Return the number of parameters in a script's optimizers that never get a gradient."""
        seen = self.result.observed
        return seen.gradients.without if seen else 0

    @property
    def account(self) -> MemoryAccount:
        """Return what held memory, if that was recorded (`with_account`); otherwise empty."""
        return self.result.memory_account or MemoryAccount()

    @property
    def took_s(self) -> float:
        """Return the wall time of the run in seconds."""
        return self.result.bench.duration_s if self.result.bench else 0.0


def jobs_for(device: str) -> int:
    """Return the number of points to run in parallel: for simulated ones the number of cores, limited by
    memory; 1 for real ones, which would disturb each other."""
    if device != "sim":
        return 1
    free = available_memory()
    room = usable_cores() if free is None else free // _JOB_BYTES
    return max(1, min(usable_cores(), room))


def run(
    tasks: Iterable[tuple[Config, Path]], pool: "Pool", progress: Progress | None = None
) -> Iterator[Trial]:
    """Start `tasks` (configurations with existing folders) while `pool` has room; yield a trial as each ends.
    The next task is requested only when there is room for it.

    Raises `BenchError` if a folder can no longer be written, or nothing can be started.
    """
    shown, left = progress or Progress(), iter(tasks)
    while True:
        while pool.has_room and (task := next(left, None)) is not None:
            config, folder = task
            with disk_errors(folder.parent):
                pool.start(config, folder)
            shown.started(config)
        if not pool.running:
            return
        for config, folder, result in pool.finished(_POLL_S):
            yield Trial(config, result, folder)
        shown.tick(pool.states)


@contextlib.contextmanager
def thrown_away(purpose: str) -> Iterator[Path]:
    """Yield a temporary folder, which is removed afterwards, also on an interruption."""
    prefix = f"fsdpbench-{purpose}-"
    with interruption.unwinding(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


def run_in(
    folder: Path, configs: Sequence[Config], jobs: int, tell: Callable[[int], None] = lambda done: None
) -> list[Trial]:
    """Run `configs` in new folders below `folder`, `jobs` at a time; return trials in the order of `configs`.
    `tell` is called with the number done. Raises what `run` raises."""

    def tasks() -> Iterator[tuple[Config, Path]]:
        for config in configs:
            places.append(Path(tempfile.mkdtemp(dir=folder)))
            yield config, places[-1]

    places: list[Path] = []
    found = {trial.folder: trial for trial in run_at(tasks(), jobs, tell)}
    return [found[place] for place in places]


def run_at(
    tasks: Iterable[tuple[Config, Path]], jobs: int, tell: Callable[[int], None] = lambda done: None
) -> list[Trial]:
    """Run each configuration in its folder, `jobs` at a time; return trials as they end. `tell`: `run_in`."""
    found = []
    with PointPool(jobs) as pool:
        for trial in run(tasks, pool):
            found.append(trial)
            tell(len(found))
    return found


def simulate(
    configs: Sequence[Config], jobs: int, tell: Callable[[int], None] = lambda done: None
) -> list[Trial]:
    """Run `configs` in a temporary folder, otherwise like `run_in`."""
    with thrown_away("trials") as folder:
        return run_in(folder, configs, jobs, tell)


def expected(like: Trial, count: int, jobs: int) -> str:
    """Return in words how long `count` trials like this one take in `jobs`; empty below a second."""
    seconds = like.took_s * -(-count // jobs)
    return f", about {seconds:.0f} s" if seconds >= 1 else ""


def with_room(config: Config) -> Config:
    """Return `config` on the same GPUs with far more memory."""
    return replace(config, what_if=replace(config.what_if or WhatIf(), room=_ROOMY, account=False))


def with_account(config: Config) -> Config:
    """Return `config`, changed to record what holds memory."""
    return replace(config, what_if=replace(config.what_if or WhatIf(), account=True))
