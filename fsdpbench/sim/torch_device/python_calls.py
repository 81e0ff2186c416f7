"""CPU time of the Python that runs between operators: a cost for each call of a function.

Counted are calls of functions of the program and of its packages; the standard library's, whose number
depends on Python's version, are not. Counting (`sys.setprofile`) doubles a step's real time. So the second
step of a simulation is counted, and later ones repeat its counts, operator by operator, as long as they call
the same operators:

    step 1   builds states and fills caches: not counted
    step 2   [ 3 calls ] linear [ 1 call ] gelu [ 41 calls ] all_gather ... [ 7 calls ] end
    step 3     as step 2   =      as step 2  =    counted from here: another operator than in step 2
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fsdpbench.sim.torch_device.accelerator import Accelerator

_PACKAGE = os.path.dirname(os.path.abspath(sys.modules["fsdpbench"].__file__ or "")) + os.sep
_OF_PROGRAMS = tuple(f"{_PACKAGE}{each}{os.sep}" for each in ("impl", "workloads", "systems"))
_TORCH = os.path.dirname(torch.__file__) + os.sep
_COMPILER = tuple(
    _TORCH + each
    for each in ("_dynamo", "_inductor", "_functorch", "fx", "_subclasses", "_refs", "_prims", "_decomp")
    + ("_meta_registrations", "_library", "_ops", "library", "_guards", "_logging", "compiler")
)
"""Modules that run while operators and graphs get their plans."""
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple({sysconfig.get_path(each) + os.sep for each in ("purelib", "platlib")})
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")
"""`module_call_us` is their time."""
_END = "end of the step"


class PythonCalls:
    """Advances the clock by the calls of a step. `counting`: whether this step is being counted."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._weights: dict[CodeType, int] = {}
        self._previous: Any = None
        self.forget()

    def forget(self) -> None:
        """Forget the steps of the previous simulation."""
        self.counting = False
        self.calls = 0
        self._began = 0
        self._at = -1
        self._step: list[tuple[Any, int]] = []

    def begin_step(self) -> None:
        """Begin a step of the program."""
        self._began += 1
        self._at = 0
        if not self._step and self._began > 1:
            self._count()

    def end_step(self) -> None:
        """Charge what follows the last operator, and end the step (no effect without one)."""
        if self._at >= 0 and (self.counting or self._at < len(self._step)):
            if self.counting or self._step[self._at][0] is _END:
                self.before(_END)
        self._at = -1
        if self.counting:
            self.counting = False
            sys.setprofile(self._previous)

    def before(self, operator: Any) -> None:
        """Charge the calls since the operator before this one."""
        at = self._at
        if at < 0 or not self._step and not self.counting:
            return
        self._at = at + 1
        if self.counting:
            calls, self.calls = self.calls, 0
            self._step.append((operator, calls))
        else:
            expected, calls = self._step[at] if at < len(self._step) else (_END, 0)
            if expected is not operator:
                del self._step[at:]
                self._step.append((operator, calls))
                self._count()
        self._accelerator.timeline.cpu += calls * self._accelerator.cpu_costs.python_call_ns

    def _count(self) -> None:
        """Count calls from here to the end of the step."""
        self.counting, self.calls, weights = True, 0, self._weights
        self._previous = sys.getprofile()

        def called(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                code = frame.f_code
                weight = weights.get(code)
                if weight is None:
                    weight = weights[code] = int(_is_counted(code))
                self.calls += weight

        sys.setprofile(called)


def _is_counted(code: CodeType) -> bool:
    """Return whether a function belongs to the program. Comprehensions are calls in some versions alone."""
    name, file = code.co_name, code.co_filename
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    if (name.startswith("<") and name != "<lambda>") or name in _MODULE_CALLS or file.startswith("<"):
        return False
    if file.startswith(_PACKAGE):
        return file.startswith(_OF_PROGRAMS)
    if file.startswith(_STANDARD) and not file.startswith(_PACKAGES):
        return False
    return not file.startswith(_COMPILER)
