"""Spans of `torch.profiler.record_function` in simulated time.

With a trace running, entering and leaving a span notes the simulated CPU time; without, both do nothing, so that
host time is not spent on torch's own profiler calls. Neither costs simulated time.
"""

from __future__ import annotations

from typing import Any

from fsdpbench.sim.accelerator import ACCELERATOR


class SimulatedSpan:
    """Methods for `torch.autograd.profiler.record_function` (`patches.py` puts them there)."""

    name: str

    def __enter__(self) -> Any:
        if ACCELERATOR.trace is not None:
            self._sim_start = ACCELERATOR.timeline.cpu
        else:
            self._sim_start = -1
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._sim_start >= 0 and ACCELERATOR.trace is not None:
            ACCELERATOR.trace.annotation(self.name, self._sim_start, ACCELERATOR.timeline.cpu)


class FastSpan(SimulatedSpan):
    """In place of `torch._C._profiler._RecordFunctionFast`, whose C++ type cannot be patched."""

    __slots__ = ("_sim_start", "name")

    def __init__(self, name: str, input_values: Any = None, keyword_values: Any = None) -> None:
        self.name = name
        self._sim_start = -1
