"""The one loop over configurations, and what came of each: `run(tasks, pool)` yields trials as they end.

    tasks ──while the pool has room──> start ──> poll ──> Trial ──> whoever iterates

A sweep keeps what comes back in its store (`runner.py`); `simulate` runs configurations in a folder that is
thrown away, for forecasts (`prediction.py`), explanations, advice and the doctor. Limits of processes and
memory are the pool's (`jobs_for`), as are timeouts; leaving the pool's context ends what still runs.
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
"""What one simulated configuration takes beyond what it shares with the fork server."""
_ROOMY = 256.0
"""Times the memory that a GPU has, to see how much would be needed and how fast it would be."""


class Pool(Protocol):
    """Runs points, each in a folder of its own (`launch.pool` here, `launch.slurm` on a cluster)."""

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
    """Is notified of what happens, in order; this one shows nothing. `total` 0: the number is not known."""

    def begin(self, total: int, already_done: int) -> None: ...
    def started(self, config: Config) -> None: ...
    def finished(self, config: Config, result: Result) -> None: ...
    def tick(self, states: Callable[[], list[PointState]]) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Trial:
    """One configuration that was tried, and its result. Bytes; seconds; samples a second and GPU."""

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
        """Whether it ran to its end, with data races or without."""
        return self.status in (Status.OK, Status.RACE)

    @property
    def step_time_s(self) -> float | None:
        return self.result.step_time_s

    @property
    def speed(self) -> float | None:
        """Samples a second and GPU; of a script, which has no samples, steps a second."""
        step = self.step_time_s
        return self.result.samples_per_s_per_gpu or (1.0 / step if step else None)

    @property
    def allocated(self) -> int | None:
        """Peak of what tensors hold, bytes."""
        peaks = self.result.peak_memory_bytes
        return None if peaks is None or peaks.allocated is None else int(peaks.allocated)

    @property
    def reserved(self) -> int | None:
        """Peak of what the allocator holds, bytes."""
        return None if self.result.reserved is None else int(self.result.reserved)

    @property
    def retries(self) -> float:
        """Allocator retries a step."""
        return self.result.alloc_retries_per_step or 0.0

    @property
    def flops(self) -> float | None:
        """The model's, of one step."""
        step, tflops = self.step_time_s, self.result.tflops_per_gpu
        return step * tflops * 1e12 if step and tflops else None

    @property
    def interval(self) -> Interval | None:
        """The interval of the real figures; None where nothing was simulated as it is."""
        return self.result.interval

    @property
    def risky(self) -> bool:
        """Whether memory fits only inside the prediction's error, or with retries."""
        return self.result.is_risky

    @property
    def untrained(self) -> int:
        """Parameters of a script's optimizers that have no gradient in any step."""
        seen = self.result.observed
        return seen.gradients.without if seen else 0

    @property
    def account(self) -> MemoryAccount:
        """Who held memory, where it was asked for (`with_account`); empty elsewhere."""
        return self.result.memory_account or MemoryAccount()

    @property
    def took_s(self) -> float:
        """Real seconds that the run took."""
        return self.result.bench.duration_s if self.result.bench else 0.0


def jobs_for(device: str) -> int:
    """Return the number of points to run side by side: simulated ones on all cores, as far as memory
    suffices; real ones would disturb each other."""
    if device != "sim":
        return 1
    free = available_memory()
    room = usable_cores() if free is None else free // _JOB_BYTES
    return max(1, min(usable_cores(), room))


def run(
    tasks: Iterable[tuple[Config, Path]], pool: "Pool", progress: Progress | None = None
) -> Iterator[Trial]:
    """Start `tasks` (a configuration and its folder, which exists) while `pool` has room; yield each as it
    ends. `tasks` is asked for the next one only when there is room for it.

    Raises `BenchError` if a folder cannot be written any more, or nothing can be started.
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
    """Give a temporary folder, which an interruption removes too."""
    prefix = f"fsdpbench-{purpose}-"
    with interruption.unwinding(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


def run_in(
    folder: Path, configs: Sequence[Config], jobs: int, tell: Callable[[int], None] = lambda done: None
) -> list[Trial]:
    """Run `configs` in new folders below `folder`, `jobs` at a time; the trials in the order of `configs`.
    `tell` hears how many are done. Raises as `run` does."""

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
    """Run each configuration in its folder, `jobs` at a time; the trials as they end (`tell`: `run_in`)."""
    found = []
    with PointPool(jobs) as pool:
        for trial in run(tasks, pool):
            found.append(trial)
            tell(len(found))
    return found


def simulate(
    configs: Sequence[Config], jobs: int, tell: Callable[[int], None] = lambda done: None
) -> list[Trial]:
    """Run `configs` in a folder that is thrown away. As `run_in`."""
    with thrown_away("trials") as folder:
        return run_in(folder, configs, jobs, tell)


def expected(like: Trial, count: int, jobs: int) -> str:
    """Return how long `count` trials like that one will take, in words; nothing where that is not a time."""
    seconds = like.took_s * -(-count // jobs)
    return f", about {seconds:.0f} s" if seconds >= 1 else ""


def with_room(config: Config) -> Config:
    """Return `config` on GPUs of far more memory, which are otherwise the same."""
    return replace(config, what_if=replace(config.what_if or WhatIf(), room=_ROOMY, account=False))


def with_account(config: Config) -> Config:
    """Return `config`, with account kept of who holds memory."""
    return replace(config, what_if=replace(config.what_if or WhatIf(), account=True))
