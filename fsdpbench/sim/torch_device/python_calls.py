"""CPU time of the Python that runs between operators: a cost for each call of a function.

Between two operators the first call of a function costs all of it, others 15 %, as calls of `tree_map` do on
one host. Functions of the standard library, whose number of calls depends on Python's version, cost nothing.
Counting (`sys.setprofile`) adds a third to a step's real time. So the second step of a simulation is counted,
and later ones repeat its counts while they call the same operators:

    step 1   builds states and fills caches: not counted
    step 2   [ 3 calls ] linear [ 1 call ] gelu [ 41 calls ] all_gather ... [ 7 calls ] end
    step 3     as step 2   =      as step 2  =    counted from here: another operator than in step 2

A script's first step has no beginning that is known: its third is counted, and its second costs no Python.
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
_INSTALLED = "-packages" + os.sep  # below the standard library, where no virtual environment has them
_PLANNING = ("_compile", "_dynamo", "_inductor", "_functorch", "fx", "_subclasses", "_refs", "_prims",
             "_decomp", "_ops", "_meta_registrations", "_library", "library", "_guards", "_logging",
             "compiler")  # fmt: skip
_OF_PLANNING = tuple(os.path.join(os.path.dirname(torch.__file__), each) for each in _PLANNING)
"""Modules that run while operators and graphs get their plans."""
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")  # `module_call_us` is their time
_GENERATORS = 0x20 | 0x80 | 0x200
_END = "end of the step"
_PAUSES = sys.version_info < (3, 12)  # later ones instrument all functions again each time
FIRST, AGAIN = 100, 15  # what calls weigh, in hundredths


def _is_counted(code: CodeType) -> bool:
    """Return whether a function is the program's. Comprehensions are calls in some versions of Python."""
    name, file = code.co_name, code.co_filename
    if code.co_flags & _GENERATORS or name in _MODULE_CALLS or file.startswith(("<", *_OF_PLANNING)):
        return False
    if file.startswith(_PACKAGE):
        counted = file.startswith(_OF_PROGRAMS)
    else:
        counted = _INSTALLED in file or not file.startswith(_STANDARD)
    return counted and (name == "<lambda>" or not name.startswith("<"))


class PythonCalls:
    """Charges an `Accelerator` for the `calls`, in hundredths, of the thread that begins a step."""

    counting = False
    """Whether they are counted now."""
    _paused = False
    _comparison = 0  # the `id` of the outermost `__eq__`'s frame; calls from there on are not counted:
    # tables in C++ (DTensor's of shardings) hash by address, and compare keys now more often, now less

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._codes: dict[int, tuple[CodeType, bool]] = {}  # by `id`: hashing one takes longer than its call
        self._called: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """Forget the steps of the previous simulation."""
        self._stop()
        self.hidden = False  # whether another profiler hid calls of a step
        self.calls, self._begun, self._at, self.thread = 0, 0, -1, 0
        self._step: list[tuple[Any, int]] = []

    def begin_step(self) -> None:
        """Begin a step of the program."""
        self._begun += 1
        self._at, self.thread = 0, threading.get_ident()
        if not self._step and self._begun > 1:
            self._count()

    def end_step(self) -> None:
        """Charge what follows the last operator, and end the step (no effect without one)."""
        if self.counting or self._step[self._at : self._at + 1] == self._step[-1:]:
            self.before(_END)
        self._at = -1
        self._stop()

    def before(self, operator: Any) -> None:
        """Charge the calls since the operator before this one."""
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
        """Forget the calls so far: they are the simulator's own, or charged."""
        if threading.get_ident() == self.thread:
            self.calls, self._comparison = 0, 0
            self._called.clear()
            self.resume()

    def pause(self) -> bool:
        """See no calls until `resume` or `leave`, in a part of the simulator that calls nothing counted.

        Unseen its Python takes half the time. Return whether calls were seen so far.
        """
        if not (self.counting and _PAUSES and sys.getprofile() is self._function):
            return False
        sys.setprofile(None)
        self._paused = True
        return True

    def resume(self) -> None:
        """See calls again, if they are not seen."""
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
        """Count no more; without effect on a function that the program has set since, which saw the calls."""
        if not self.counting:
            return
        self.counting = False
        if sys.getprofile() is not self._function:
            self._step, self.hidden = [], True  # too few were counted
        elif hasattr(self._previous, "enable"):  # `cProfile`: not a function
            self._previous.enable()
        else:
            sys.setprofile(self._previous)
