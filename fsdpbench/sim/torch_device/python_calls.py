"""CPU time of Python between operators: a cost per function call.

Between two operators, the first call of a function has the full cost, and repeated calls 15 % (measured for
`tree_map` on one host). Functions of the standard library cost nothing, because their number of calls depends
on Python's version. Counting (`sys.setprofile`) adds a third to a step's real time. So calls are counted in
the second step of a simulation, and later steps reuse the counts while they call the same operators:

    step 1   creates states and fills caches: not counted
    step 2   [ 3 calls ] linear [ 1 call ] gelu [ 41 calls ] all_gather ... [ 7 calls ] end
    step 3     as step 2   =      as step 2  =    counted from here: the operator differs from step 2

A script's first step has no known start: its third step is counted, and Python is free in its second.
"""

import os
import sys
import sysconfig
import threading
from types import CodeType
from typing import Any

import torch

from fsdpbench.sim.torch_device.backward_streams import take_error

_PACKAGE = os.path.dirname(os.path.abspath(sys.modules["fsdpbench"].__file__ or "")) + os.sep
_OF_PROGRAMS = tuple(f"{_PACKAGE}{each}{os.sep}" for each in ("impl", "workloads", "systems"))
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = "-packages" + os.sep  # inside the standard library's folder, unless in a virtual environment
_PLANNING = ("_compile", "_dynamo", "_inductor", "_functorch", "fx", "_subclasses", "_refs", "_prims",
             "_decomp", "_ops", "_meta_registrations", "_library", "library", "_guards", "_logging",
             "compiler")  # fmt: skip
_OF_PLANNING = tuple(os.path.join(os.path.dirname(torch.__file__), each) for each in _PLANNING)
"""Modules that run while operators and graphs are planned."""
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")  # their time is `module_call_us`
_GENERATORS = 0x20 | 0x80 | 0x200
_END = "end of the step"
_PAUSES = sys.version_info < (3, 12)  # later versions instrument all functions again after each pause
FIRST, AGAIN = 100, 15  # costs of calls, in hundredths


def _is_counted(code: CodeType) -> bool:
    """Return whether calls of a function count. Comprehensions, which are calls in some versions, do not."""
    name, file = code.co_name, code.co_filename
    if code.co_flags & _GENERATORS or name in _MODULE_CALLS or file.startswith(("<", *_OF_PLANNING)):
        return False
    if file.startswith(_PACKAGE):
        counted = file.startswith(_OF_PROGRAMS)
    else:
        counted = _INSTALLED in file or not file.startswith(_STANDARD)
    return counted and (name == "<lambda>" or not name.startswith("<"))


class PythonCalls:
    """Counter that charges an `Accelerator` for `calls` (in hundredths) of the thread that begins a step."""

    counting = False
    """Whether calls are being counted."""
    _paused = False
    _comparison = 0  # `id` of the outermost `__eq__` frame. Calls inside it are not counted, because C++ hash
    # tables (DTensor's, of shardings) hash by address and compare keys more often in some runs than in others

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._codes: dict[int, tuple[CodeType, bool]] = {}  # by `id`: hashing a code is slower than its call
        self._called: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """Forget the steps of the previous simulation."""
        self._stop()
        self.hidden = False  # whether another profiler hid the calls of a step
        self.calls, self._begun, self._at, self.thread = 0, 0, -1, 0
        self._step: list[tuple[Any, int]] = []

    def begin_step(self) -> None:
        """Begin a step of the program."""
        self._begun += 1
        self._at, self.thread = 0, threading.get_ident()
        if not self._step and self._begun > 1:
            self._count()

    def end_step(self) -> None:
        """Charge the calls after the last operator, and end the step (no effect outside of a step)."""
        if self.counting or self._step[self._at : self._at + 1] == self._step[-1:]:
            self.before(_END)
        self._at = -1
        self._stop()

    def before(self, operator: Any) -> None:
        """Charge the calls between the previous operator and this one."""
        at = self._at
        if at < 0 or not (self._step or self.counting) or threading.get_ident() != self.thread:
            return
        self._at = at + 1
        if self.counting:
            calls, self.calls = self.calls, 0
            self._called.clear()
            self._step.append((operator, calls))
        else:
            expected, calls = self._step[at]
            if expected is not operator:
                self._step[at:] = [(operator, calls)]
                self._count()
        self._accelerator.timeline.cpu += calls * self._accelerator.cpu_costs.python_call_ns // 100

    def leave(self) -> None:
        """Discard the calls so far, which are the simulator's own or already charged."""
        if threading.get_ident() == self.thread:
            self.calls, self._comparison = 0, 0
            self._called.clear()
            self.resume()

    def pause(self) -> bool:
        """Stop seeing calls until `resume` or `leave`, in simulator code that makes no calls that count.

        Its Python then takes half the time. Return whether calls were seen so far.
        """
        if not (self.counting and _PAUSES and sys.getprofile() is self._function):
            return False
        sys.setprofile(None)
        self._paused = True
        return True

    def resume(self) -> None:
        """See calls again if they are paused."""
        if self._paused:
            self._paused = False
            sys.setprofile(self._function)

    def _count(self) -> None:
        """Count calls from here to the end of the step."""
        self.counting, codes, known = True, self._codes, self._called
        self.leave()
        self._previous: Any = sys.getprofile()

        def called(frame: Any, event: str, argument: Any) -> None:
            if self._comparison:
                if event == "return" and id(frame) == self._comparison:
                    self._comparison = 0
            elif event == "call":
                if frame.f_code.co_name == "type_" and (error := take_error()) is not None:  # device guard
                    self._accelerator.backward.errors.append(error)
                code, place = frame.f_code, id(frame.f_code)
                if code.co_name == "__eq__":
                    self._comparison = id(frame)
                elif (codes.get(place) or codes.setdefault(place, (code, _is_counted(code))))[1]:
                    self.calls += AGAIN if place in known else FIRST
                    known.add(place)

        self._function = called
        sys.setprofile(called)

    def _stop(self) -> None:
        """Stop counting, unless the program has set another profile function, which saw the calls."""
        if not self.counting:
            return
        self.counting = False
        if sys.getprofile() is not self._function:
            self._step, self.hidden = [], True  # too few calls were counted
        elif hasattr(self._previous, "enable"):  # `cProfile`, which is not a function
            self._previous.enable()
        else:
            sys.setprofile(self._previous)
