"""How long a batch takes the host, in real time: the loaders' own work, measured as it is done.

Workers are other processes; each writes what its batches took to a file. Simulated time stops
meanwhile, except for a `time.sleep` of the script's own, which is there on both clocks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fsdpbench.sim import Simulation
from fsdpbench.torch_internals import BaseDataLoaderIter, IterableDatasetFetcher, MapDatasetFetcher

_FILE = "loader_times"
_now = time.monotonic
_WAITED = Path("/proc/thread-self/schedstat")
_LEAST = 3
"""Batches that are needed to say something, the first one left out."""


class Loaders:
    """Measures every batch that `DataLoader`s make, here and in their workers."""

    def __init__(self, folder: Path, simulation: Simulation) -> None:
        self._simulation = simulation
        self.taken = 0
        """Batches that the script has taken."""
        self._file = folder.absolute() / _FILE
        self._pid = os.getpid()
        self._times: list[float] = []
        self._charged: list[float] = []
        for kind in (MapDatasetFetcher, IterableDatasetFetcher):
            self._around_fetch(kind)
        self._around_next()

    def _around_fetch(self, kind: Any) -> None:
        original = kind.fetch

        def timed(fetcher: Any, index: Any) -> Any:
            began, waited = _now(), _waited_for_a_core()
            found = original(fetcher, index)
            took = max(0.0, _now() - began - (_waited_for_a_core() - waited))
            if os.getpid() == self._pid:
                self._times.append(took)
            else:
                with self._file.open("a") as file:
                    file.write(f"{took:.6f}\n")
            return found

        kind.fetch = timed

    def _around_next(self) -> None:
        kind: Any = BaseDataLoaderIter
        original = kind.__next__

        def counted(iterator: Any) -> Any:
            began = self._simulation.cpu_ns()
            found = original(iterator)
            self.taken += 1
            self._charged.append((self._simulation.cpu_ns() - began) / 1e9)
            return found

        kind.__next__ = counted

    def to_dict(self, steps: int) -> dict[str, float] | None:
        """`seconds` that a batch takes, `batches` a step, `charged_s` that the simulation knows of already;
        None where there were too few."""
        times = self._times or self._read()
        if len(times) < _LEAST or not steps or not self.taken:
            return None
        usual = sorted(times[1:])
        # The lower quartile: on a busy machine others take their time out of the rest.
        return {
            "seconds": usual[len(usual) // 4],
            "batches": self.taken / steps,
            "charged_s": sorted(self._charged)[len(self._charged) // 2],
        }

    def _read(self) -> list[float]:
        try:
            found = [float(line) for line in self._file.read_text().split()]
            self._file.unlink()
        except (OSError, ValueError):
            return []
        return found


def _waited_for_a_core() -> float:
    """Seconds that this thread was ready and had no core, on a machine that is busy; 0 where Linux does not
    say."""
    try:
        return int(_WAITED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
