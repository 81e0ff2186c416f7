"""The time that a configuration's processes used, which its `--timeout` counts.

A process on a busy machine often waits for a processor: such waits do not count, sleep and waits for files
or locks do. Linux says both for each process; elsewhere all time counts.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.configuration.config import Config

_MOST = 10.0
"""A configuration ends after so many times its timeout, however busy the machine is."""
_IDLE = 0.05
"""Share of a processor below which a process does nothing."""


@dataclass(frozen=True)
class Reading:
    """Seconds of a process group so far: on processors (all together), and the longest wait for one."""

    at: float
    processor_s: float
    queued_s: float


@dataclass(frozen=True)
class PointState:
    """How far a configuration is that runs. `steps`: in words; `waits`: for what it waits, if it does."""

    config: Config
    processor_s: float
    steps: str | None
    waits: str | None


class UsedTime:
    """The used time of the process group that `leader` leads, from now on."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._began = time.monotonic()
        self._busy = Reading(self._began, 0.0, 0.0)

    def used_s(self) -> float:
        """Return the seconds that count for the timeout."""
        took = time.monotonic() - self._began
        return max(took - self._read().queued_s, took / _MOST)

    def idle_s(self) -> float:
        """Return the seconds since the processes last used a processor, or waited for one."""
        now, last = self._read(), self._busy
        active = now.processor_s - last.processor_s + max(0.0, now.queued_s - last.queued_s)
        if active > max(0.2, _IDLE * (now.at - last.at)) or now.processor_s < last.processor_s:
            self._busy = now
        return now.at - self._busy.at

    def processor_s(self) -> float:
        """Return the processor time of the processes that are running."""
        return self._read().processor_s

    def _read(self) -> Reading:
        processor, queued = 0.0, 0.0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(process.name)) != self._leader:
                    continue
                running, waiting, _ = (process / "schedstat").read_text().split()
            except (OSError, ValueError):
                continue  # it has ended, or the system does not say
            processor += int(running) / 1e9
            queued = max(queued, int(waiting) / 1e9)
        return Reading(time.monotonic(), processor, queued)
