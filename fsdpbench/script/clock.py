"""What a script's own clock reads: simulated time, so that the tokens a second that it prints are right.

`time.perf_counter()` is the simulated CPU's time for everybody. By `time.time()` and `time.sleep()` libraries
also tell wall time and deadlines, so these change for the script's own files alone: `time()` starts at the
real time and continues with the simulated one, `sleep()` sleeps and lets simulated time pass.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from fsdpbench.script.own_files import OwnFiles
from fsdpbench.sim import Simulation


def map_clock(simulation: Simulation, own_files: OwnFiles) -> None:
    """From now on clocks tell simulated time, `time()` and `sleep()` to the script's own files."""
    real_time, real_sleep = time.time, time.sleep
    start = real_time()

    def asked_by_script() -> bool:
        """Whether a file of the script's own called the clock."""
        return own_files.has(sys._getframe(2).f_code.co_filename)

    def perf_counter_ns() -> int:
        return simulation.cpu_ns()

    def perf_counter() -> float:
        return simulation.cpu_ns() / 1e9

    def told_time() -> float:
        return start + simulation.cpu_ns() / 1e9 if asked_by_script() else real_time()

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if asked_by_script():
            simulation.advance_cpu(round(seconds * 1e9))

    replacements: dict[str, Callable[..., object]] = {
        "perf_counter": perf_counter,
        "perf_counter_ns": perf_counter_ns,
        "time": told_time,
        "sleep": sleep,
    }
    for name, replacement in replacements.items():
        setattr(time, name, replacement)
