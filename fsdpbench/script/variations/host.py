"""Variations of what the host does: where the CPU waits, and how long a batch takes it."""

from __future__ import annotations

from typing import Any

from fsdpbench.script.observed.waits import Waits
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.device_module import Event
from fsdpbench.torch_internals import BaseDataLoaderIter


class NoWaits:
    """The CPU continues where lines of the script's own make it wait for the device."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        waits.skipped = True
        kind: Any = Event
        original = kind.elapsed_time

        def elapsed_time(event: Any, end: Any) -> float:
            try:
                return float(original(event, end))
            except RuntimeError:  # nobody has waited for it
                return 0.0

        kind.elapsed_time = elapsed_time

    @property
    def count(self) -> int:
        return self._waits.count


class LoaderTime:
    """A batch of a `DataLoader` takes the host so many seconds (`0.05/4`: of each of 4 workers).

    Workers are as torch's: each has two batches to make, and gets the next when one is taken.
    """

    def __init__(self, value: str, simulation: Simulation) -> None:
        self.count = 0
        seconds, _, workers = value.partition("/")
        self._ns, self._workers = round(float(seconds) * 1e9), int(workers or 0)
        kind: Any = BaseDataLoaderIter
        original = kind.__next__

        def following(iterator: Any) -> Any:
            began = simulation.cpu_ns()
            batch = original(iterator)
            simulation.accelerator.timeline.cpu = self._ready(iterator, began)
            self.count += 1
            return batch

        kind.__next__ = following

    def _ready(self, iterator: Any, now: int) -> int:
        """When the CPU has the batch that it asks for now; the timeline's nanoseconds."""
        if not self._workers:
            return now + self._ns
        state = iterator.__dict__.setdefault("_sim_ready", _WorkerTimes(self._workers, self._ns, now))
        return state.take(now)


class _WorkerTimes:
    """When the workers' batches are ready."""

    def __init__(self, workers: int, each_ns: int, now: int) -> None:
        # As workers are that have run for long: their batches come one by one, not all at once.
        self._each = each_ns
        self._free = [now - each_ns * (workers - 1 - index) // workers for index in range(workers)]
        self._made: list[int] = []
        self._taken = 0
        for _ in range(2 * workers):
            self._order(now)

    def _order(self, now: int) -> None:
        worker = len(self._made) % len(self._free)
        self._free[worker] = max(self._free[worker], now) + self._each
        self._made.append(self._free[worker])

    def take(self, now: int) -> int:
        """When the next batch is there; one more is ordered then."""
        ready = max(now, self._made[self._taken])
        self._taken += 1
        self._order(ready)
        return ready
