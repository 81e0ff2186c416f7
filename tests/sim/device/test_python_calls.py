"""CPU time of Python between operators: calls are counted in the second step and repeated in later ones."""

from __future__ import annotations

import contextlib
import cProfile
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdpbench.base.configuration.config import Config
from fsdpbench.sim.torch_device.python_calls import FIRST, PythonCalls

pytestmark = pytest.mark.simulated


def times(*steps: Callable[[torch.Tensor], None], operators: int = 1) -> list[int]:
    """Calls that each step was charged for, in hundredths: its CPU time without that of its operators."""
    from device_training import start

    sim, taken, own = start(), [], sys.getprofile()
    x = torch.ones(8, device="sim")
    for each in steps:
        before = sim.cpu_ns()
        sim.accelerator.python.begin_step()
        each(x)
        sim.accelerator.python.end_step()
        taken.append(sim.cpu_ns() - before)
        assert sys.getprofile() is own
    x.add_(1)
    before = sim.cpu_ns()
    x.add_(1)
    operator = sim.cpu_ns() - before
    return [round((ns - operators * operator) / (sim.profile.cpu.python_call_us * 10)) for ns in taken]


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


def test_a_simulation_that_starts_in_a_step_ends_its_counting() -> None:
    from device_training import start

    for _ in range(2):
        sim = start()
        torch.distributed.destroy_process_group()
        assert sys.getprofile() is None
        for _ in range(2):
            sim.accelerator.python.begin_step()
        assert sys.getprofile() is not None
    sim.end()


def test_a_profile_function_set_in_the_step_stays_and_the_step_is_counted_again() -> None:
    def own(frame: object, event: str, argument: object) -> None:
        pass

    def profiled(x: torch.Tensor) -> None:
        sys.setprofile(own)
        with_calls(3, 2)(x)
        assert sys.getprofile() is own
        sys.setprofile(None)

    assert times(with_calls(3, 2), profiled, with_calls(3, 2), with_calls(3, 2))[2:] == [TWICE_TWO, TWICE_TWO]


def test_a_profiler_in_c_goes_on_after_the_step() -> None:
    """It is not a function of Python before 3.12."""
    with cProfile.Profile() as profiler:
        counted = times(*[with_calls(3, 2)] * 3)
    assert counted == [0, TWICE_TWO, TWICE_TWO]
    assert any(entry.code is nothing.__code__ and entry.callcount >= 10 for entry in profiler.getstats())


def test_threads_beside_the_step_do_not_count() -> None:
    """Not their calls, and their operators are not the step's: they may come at any time."""

    def beside(change: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
        def step(x: torch.Tensor) -> None:
            nothing()
            thread = threading.Thread(target=lambda: change(x))
            thread.start()
            thread.join()
            nothing()
            x.add_(1)

        return step

    add, multiply = beside(lambda x: x.add_(1)), beside(lambda x: x.mul_(2))
    assert times(add, add, multiply, add, operators=2) == [0, 215, 215, 215]


def test_code_without_a_hash_is_counted() -> None:
    """Dynamo makes functions whose constants cannot be hashed; compilers run before the first step."""

    def function() -> int:
        return 1

    function.__code__ = function.__code__.replace(co_consts=(None, {}))
    costs = SimpleNamespace(python_call_ns=1_000)
    accelerator = SimpleNamespace(timeline=SimpleNamespace(cpu=0), cpu_costs=costs)
    calls = PythonCalls(accelerator)
    calls.leave()
    for _ in range(3):
        calls.begin_step()
        calls.before("first")
        function()
        calls.before("second")
        calls.end_step()
    assert accelerator.timeline.cpu == 2 * 1_000 * FIRST // 100


class Key:
    """A key of a table, whose comparison calls another function."""

    def __eq__(self, other: object) -> bool:
        nothing()
        return self is other

    __hash__ = None  # type: ignore[assignment]


def test_comparisons_of_keys_do_not_count() -> None:
    """Tables of C++ hash by address: how often they compare a process decides, not the program."""

    def compared(often: int) -> Callable[[torch.Tensor], None]:
        def step(x: torch.Tensor) -> None:
            keys = [Key() for _ in range(often)]
            assert Key() not in keys
            nothing()
            x.add_(1)

        return step

    assert times(compared(0), compared(5)) == [0, 200]  # of the step and of what it calls itself


def test_a_comparison_that_fails_ends_too() -> None:
    class Failing:
        def __eq__(self, other: object) -> bool:
            raise ValueError

        __hash__ = None  # type: ignore[assignment]

    def step(x: torch.Tensor) -> None:
        with contextlib.suppress(ValueError):
            Failing() == 1  # noqa: B015
        nothing()
        x.add_(1)

    assert times(step, step) == [0, 200]


def test_what_hides_a_function_from_dynamo_does_not_count() -> None:
    """The sanitizer watches operators through such functions, and a step takes as long with it."""
    hidden = torch._disable_dynamo(nothing)
    hidden()

    def step(x: torch.Tensor) -> None:
        hidden()
        x.add_(1)

    assert times(step, step, step) == [0, 200, 200]  # of the step and of what is hidden


def alike_seen_or_not(config: Config, folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Whether a run has the same record and trace where the simulator's own calls are seen too."""
    from drawn_configurations import files_of

    unseen = files_of(config, folder / "unseen")
    with patch.context() as context:
        context.setattr(PythonCalls, "pause", bool)  # False; a function of Python would be counted
        seen = files_of(config, folder / "seen")
    return seen == unseen and "rank0_record.json" in seen


def test_how_often_torch_compares_specs_changes_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so in some processes more often than in others, with equal seeds of hashes too."""
    from drawn_configurations import configuration, files_of
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    config = configuration("torch-fsdp2", model="moe-tiny", batch=2, strategy="HYBRID_SHARD", ep=2)
    once, compare = files_of(config, tmp_path / "once"), DTensorSpec.__eq__
    compared = tmp_path / "compared"

    class Twice:
        def __eq__(self, other: object) -> bool:
            compared.touch()
            return compare(self, other) and compare(self, other)

        __hash__ = DTensorSpec.__hash__

    monkeypatch.setattr(DTensorSpec, "__eq__", Twice.__eq__)
    assert files_of(config, tmp_path / "twice") == once
    assert compared.exists()
    assert "rank0_record.json" in once


def test_what_the_simulator_hides_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drawn_configurations import configuration

    assert alike_seen_or_not(configuration("torch-fsdp2", batch=2, seq=64), tmp_path, monkeypatch)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(150))
def test_in_random_configurations_neither(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drawn_configurations import drawn

    config = drawn(random.Random(seed))
    assert alike_seen_or_not(config, tmp_path, monkeypatch), config.name
