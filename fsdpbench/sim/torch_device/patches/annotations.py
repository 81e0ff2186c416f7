"""Spans of `torch.profiler.record_function` in simulated time.

With a simulated trace running, entering and leaving a span notes the simulated CPU time. Otherwise torch's
own methods do their work if its profiler runs (a process may use the simulated device and others), and
nothing is done if it does not, which saves host time. Spans never cost simulated time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.torch_internals import RecordFunctionFast, profiler_enabled

_OUTSIDE = -1


def make_span_methods(span_type: type) -> tuple[Callable[..., Any], Callable[..., None]]:
    """``__enter__`` and ``__exit__`` for a class of spans with a ``name`` that has torch's own."""
    original_enter: Any = span_type.__enter__  # type: ignore[attr-defined]
    original_exit: Any = span_type.__exit__  # type: ignore[attr-defined]
    profiling = profiler_enabled

    def enter(self: Any) -> Any:
        self._sim_start = _OUTSIDE
        if ACCELERATOR.sanitizer is not None:
            ACCELERATOR.sanitizer.enter(self.name)
        if ACCELERATOR.account is not None:
            ACCELERATOR.account.enter(self.name)
        if ACCELERATOR.trace is not None:
            self._sim_start = ACCELERATOR.timeline.cpu
        elif profiling():
            return original_enter(self)
        return self

    def leave(self: Any, *exc_info: Any) -> None:
        if ACCELERATOR.sanitizer is not None:
            ACCELERATOR.sanitizer.leave(self.name)
        if ACCELERATOR.account is not None:
            ACCELERATOR.account.leave(self.name)
        if self._sim_start != _OUTSIDE:
            if ACCELERATOR.trace is not None:
                ACCELERATOR.trace.annotation(self.name, self._sim_start, ACCELERATOR.timeline.cpu)
        elif self.record is not None:
            original_exit(self, *exc_info)

    return enter, leave


class FastSpan:
    """Instead of `torch._C._profiler._RecordFunctionFast`, whose C++ type cannot be patched."""

    __slots__ = ("_original", "_sim_start", "name")
    _original_type = RecordFunctionFast

    def __init__(self, name: str, input_values: Any = None, keyword_values: Any = None) -> None:
        self.name = name
        self._sim_start = _OUTSIDE
        self._original: Any = None

    def __enter__(self) -> FastSpan:
        if ACCELERATOR.sanitizer is not None:
            ACCELERATOR.sanitizer.enter(self.name)
        if ACCELERATOR.account is not None:
            ACCELERATOR.account.enter(self.name)
        if ACCELERATOR.trace is not None:
            self._sim_start = ACCELERATOR.timeline.cpu
        elif profiler_enabled():
            self._original = self._original_type(self.name)
            self._original.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if ACCELERATOR.sanitizer is not None:
            ACCELERATOR.sanitizer.leave(self.name)
        if ACCELERATOR.account is not None:
            ACCELERATOR.account.leave(self.name)
        if self._original is not None:
            self._original.__exit__(*exc_info)
            self._original = None
        elif self._sim_start != _OUTSIDE and ACCELERATOR.trace is not None:
            ACCELERATOR.trace.annotation(self.name, self._sim_start, ACCELERATOR.timeline.cpu)
        self._sim_start = _OUTSIDE
