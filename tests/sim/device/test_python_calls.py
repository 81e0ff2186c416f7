"""CPU time of Python between operators: calls are counted in the second step and repeated in later ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

pytestmark = pytest.mark.simulated


def times(*steps: Callable[[torch.Tensor], None]) -> list[int]:
    """Calls that each step was charged for, in hundredths: its CPU time without its operator's."""
    from device_training import start

    sim, taken = start(), []
    x = torch.ones(8, device="sim")
    for each in steps:
        before = sim.cpu_ns()
        sim.accelerator.python.begin_step()
        each(x)
        sim.accelerator.python.end_step()
        taken.append(sim.cpu_ns() - before)
        assert sys.getprofile() is None
    x.add_(1)
    before = sim.cpu_ns()
    x.add_(1)
    operator = sim.cpu_ns() - before
    return [round((ns - operator) / (sim.profile.cpu.python_call_us * 10)) for ns in taken]


TWICE_TWO = (100 + 100 + 2 * 15) + (100 + 15)
"""The step itself and three calls of one function before the operator, two of it behind."""


def nothing() -> None:
    pass


def with_calls(before: int, after: int) -> Callable[[torch.Tensor], None]:
    """A step of two calls around one operator, and so many more; its own call is one before it."""

    def step(x: torch.Tensor) -> None:
        for _ in range(before):
            nothing()
        x.add_(1)
        for _ in range(after):
            nothing()

    return step


def test_calls_take_time_from_the_second_step_on() -> None:
    assert times(*[with_calls(3, 2)] * 4) == [0, TWICE_TWO, TWICE_TWO, TWICE_TWO]


def test_a_step_of_the_same_operators_repeats_the_counts_of_the_second() -> None:
    """So that only one step is run under a profile function, which doubles its real time."""
    assert times(with_calls(3, 2), with_calls(3, 2), with_calls(50, 50)) == [0, TWICE_TWO, TWICE_TWO]


def test_a_step_of_other_operators_is_counted_from_there_on() -> None:
    def other(x: torch.Tensor) -> None:
        nothing()
        x.mul_(2)
        nothing()

    assert times(with_calls(3, 2), with_calls(3, 2), other, other)[2:] == [330, 330]


def test_what_depends_on_the_version_of_python_is_not_counted() -> None:
    @contextlib.contextmanager
    def generator() -> Iterator[None]:
        yield

    def step(x: torch.Tensor) -> None:
        with generator():
            x.add_(sum([1 for _ in range(3)]))

    assert times(step, step) == [0, 100]


def test_the_program_s_own_profile_function_is_there_again() -> None:
    from device_training import start

    sim = start()

    def own(frame: object, event: str, argument: object) -> None:
        pass

    for _ in range(2):
        sys.setprofile(own)
        sim.accelerator.python.begin_step()
    assert sys.getprofile() is not own
    sim.end()  # without the step's end, as after an error
    assert sys.getprofile() is own
    sys.setprofile(None)
