"""Simulates configurations side by side, and says of each whether it fits and how fast it is."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdpbench import interruption
from fsdpbench.configuration.config import Config, WhatIf
from fsdpbench.launch.pool import PointPool
from fsdpbench.reports.result import Result
from fsdpbench.results.records import Status

_POLL_S = 0.5
_ROOMY = 16.0
"""A GPU of so many times the memory: how much would be needed, and how fast it would be."""


@dataclass(frozen=True)
class Trial:
    """What came of one simulated configuration. Bytes; samples a second and GPU (a script: steps a second).

    allocated and reserved: the peaks. account: who held memory as it ran out.
    """

    config: Config
    status: Status
    cause: str | None
    speed: float | None = None
    step_time_s: float | None = None
    allocated: int | None = None
    reserved: int | None = None
    retries: float = 0.0
    account: dict[str, Any] | None = None
    flops: float | None = None
    """The model's, of one step."""
    risky: bool = False
    """Whether memory fits only inside the prediction's error, or with retries."""
    untrained: int = 0
    """Parameters of a script's optimizers that have no gradient in any step."""
    took_s: float = 0.0
    """Real seconds that the simulation took."""

    @property
    def fits(self) -> bool:
        return self.status in (Status.OK, Status.RACE)


def simulate(configs: Sequence[Config], jobs: int, tell: Callable[[int], None]) -> list[Trial]:
    """One trial a configuration, in their order. `tell` hears how many are done. Raises `BenchError` where
    nothing can be started."""
    found: dict[int, Trial] = {}
    todo = deque(enumerate(configs))
    with interruption.unwinding(), tempfile.TemporaryDirectory(prefix="fsdpbench-explain-") as temporary:
        places: dict[Path, int] = {}
        with PointPool(jobs) as pool:
            while todo or pool.running:
                while todo and pool.has_room:
                    index, config = todo.popleft()
                    folder = Path(temporary) / f"trial{index}"
                    folder.mkdir()
                    places[folder] = index
                    pool.start(config, folder)
                for config, folder, result in pool.finished(_POLL_S):
                    found[places[folder]] = trial_of(config, result)
                    tell(len(found))
    return [found[index] for index in range(len(configs))]


def trial_of(config: Config, result: Result) -> Trial:
    """Return a result as a trial."""
    step, samples = result.step_time_s, result.samples_per_s_per_gpu
    return Trial(
        config,
        result.status,
        result.message,
        samples if samples else (1.0 / step if step else None),
        step,
        result.stored("peak_memory_bytes.allocated"),
        result.stored("peak_memory_bytes.reserved"),
        result.alloc_retries_per_step or 0.0,
        result.memory_account,
        step * result.tflops_per_gpu * 1e12 if step and result.tflops_per_gpu else None,
        result.is_risky,
        result.stored("script.observed.gradients.without") or 0,
        result.bench.duration_s if result.bench else 0.0,
    )


def expected(like: Trial, count: int, jobs: int) -> str:
    """How long `count` trials like that one will take, in words; nothing where that is not a time."""
    seconds = like.took_s * -(-count // jobs)
    return f", about {seconds:.0f} s" if seconds >= 1 else ""


def with_room(config: Config) -> Config:
    """`config` on GPUs of far more memory, which are otherwise the same."""
    return replace(config, what_if=replace(config.what_if or WhatIf(), room=_ROOMY, account=False))


def with_account(config: Config) -> Config:
    """`config`, with account kept of who holds memory."""
    return replace(config, what_if=replace(config.what_if or WhatIf(), account=True))
