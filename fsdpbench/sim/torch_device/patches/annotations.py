"""Spans of `torch.profiler.record_function` in simulated time; CPU time of module calls.

With a simulated trace running, entering and leaving a span record the simulated CPU time. Otherwise torch's
own methods run if its profiler does (a process may use the simulated device and others), and else nothing,
which saves host time. Spans never cost simulated time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdpbench.base.torch_internals import RecordFunctionFast, profiler_enabled, replace
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, Accelerator

_OUTSIDE = -1


def make_span_methods(span_type: type) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return `__enter__` and `__exit__` for a class of spans with a `name` that has torch's own."""
    original_enter: Any = span_type.__enter__  # type: ignore[attr-defined]
    original_exit: Any = span_type.__exit__  # type: ignore[attr-defined]
    profiling = profiler_enabled

    def enter(self: Any) -> Any:
        self._sim_start = _begin(self.name)
        if self._sim_start == _OUTSIDE and profiling():
            return original_enter(self)
        return self

    def leave(self: Any, *exc_info: Any) -> None:
        _end(self.name, self._sim_start)
        if self._sim_start == _OUTSIDE and self.record is not None:
            original_exit(self, *exc_info)

    return enter, leave


def _begin(name: str) -> int:
    """Tell who follows; return when the span began, `_OUTSIDE` of a trace."""
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.enter(name)
    if ACCELERATOR.account is not None:
        ACCELERATOR.account.enter(name)
    return _OUTSIDE if ACCELERATOR.trace is None else ACCELERATOR.timeline.cpu


def _end(name: str, start: int) -> None:
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.leave(name)
    if ACCELERATOR.account is not None:
        ACCELERATOR.account.leave(name)
    if start != _OUTSIDE and ACCELERATOR.trace is not None:
        ACCELERATOR.trace.annotation(name, start, ACCELERATOR.timeline.cpu)


class FastSpan:
    """Replacement of `torch._C._profiler._RecordFunctionFast`, whose C++ type cannot be patched."""

    __slots__ = ("_original", "_sim_start", "name")
    _original_type = RecordFunctionFast

    def __init__(self, name: str, input_values: Any = None, keyword_values: Any = None) -> None:
        self.name = name
        self._sim_start = _OUTSIDE
        self._original: Any = None

    def __enter__(self) -> FastSpan:
        self._sim_start = _begin(self.name)
        if self._sim_start == _OUTSIDE and profiler_enabled():
            self._original = self._original_type(self.name)
            self._original.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _end(self.name, self._sim_start)
        if self._original is not None:
            self._original.__exit__(*exc_info)
            self._original = None
        self._sim_start = _OUTSIDE


def install_module_calls(accelerator: Accelerator) -> None:
    """Replace `nn.Module.__call__` by one that costs CPU time for the call and its hooks.

    Dynamo decides by a function's file and name: it traces torch's `nn.Module.__call__`, and starts no graph
    at it. The replacement has the same file and name, so that its decisions stay the same.
    """
    module_type = torch.nn.Module
    original: Callable[..., Any] = module_type.__call__
    compiles = torch.compiler.is_compiling

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiles():  # Dynamo evaluates this to True, and does not trace the rest
            return original(self, *args, **kwargs)
        costs = accelerator.cpu_costs
        if costs is not None:
            hooks = len(self._forward_pre_hooks) + len(self._forward_hooks) + len(self._backward_hooks)
            accelerator.timeline.cpu += costs.module_call_ns + hooks * costs.hook_ns
        return original(self, *args, **kwargs)

    code = original.__code__
    call.__code__ = call.__code__.replace(co_filename=code.co_filename, co_name=code.co_name)
    call.__name__ = original.__name__
    replace(module_type, __call__=call)
