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
from typing import Any

import pytest
import torch

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.settings import Settings
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.worker import run_rank
from fsdpbench.sim.torch_device.python_calls import FIRST, PythonCalls
from fsdpbench.sweep.planning import make_config, make_target, without_absent
from fsdpbench.systems import get_system

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


def test_what_hides_a_function_from_dynamo_does_not_count() -> None:
    """The sanitizer watches operators through such functions, and a step takes as long with it."""
    hidden = torch._disable_dynamo(nothing)
    hidden()

    def step(x: torch.Tensor) -> None:
        hidden()
        x.add_(1)

    assert times(step, step, step) == [0, 200, 200]  # of the step and of what is hidden


def configuration(system: str, **settings: Any) -> Config:
    """A small one of eight simulated GPUs; `model` is among `settings`."""
    model = settings.pop("model", "gpt-tiny")
    where: dict[str, Any] = {"device": "sim", "hardware": "a100-80gb", "gpus": 8, "gpus_per_node": 4}
    target = make_target(model=model, shape={}, data=None, **where)
    return without_absent(make_config(target, system, Settings.of(**settings), target.workload()))


def files_of(config: Config, folder: Path) -> dict[str, bytes]:
    """The record and the trace of a run in a process of its own."""
    from device_training import in_new_process

    def run() -> None:
        with contextlib.suppress(Exception):  # it is in the record
            run_rank(config, Placement(0, config.gpus, 0), folder)

    in_new_process(run)
    return {path.name: path.read_bytes() for path in folder.rglob("rank0_*")}


def alike_seen_or_not(config: Config, folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Whether a run has the same record and trace where the simulator's own calls are seen too."""
    unseen = files_of(config, folder / "unseen")
    with patch.context() as context:
        context.setattr(PythonCalls, "pause", bool)  # False; a function of Python would be counted
        seen = files_of(config, folder / "seen")
    return seen == unseen and "rank0_record.json" in seen


def test_what_the_simulator_hides_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alike_seen_or_not(configuration("torch-fsdp2", batch=2, seq=64), tmp_path, monkeypatch)


VALUES: dict[str, tuple[Any, ...]] = {
    "strategy": ("SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"), "wrap": ("every-2", "root"), "batch": (2, 4),
    "backward_prefetch": ("post", "none"), "forward_prefetch": (1, 2), "limit_all_gathers": ("off", 1),
    "memory_handover": ("record_stream", "events"), "activation_checkpointing": ("op", "full"),
    "cpu_offload": (True,), "activation_offload": (True,), "optimizer": ("adamw-foreach", "sgd", "muon"),
    "linear_dtype": ("fp8",), "grad_accum": (2,), "clip": (1.0,), "lora": (8,), "zero_grad": ("fill",),
    "tp": (2,), "cp": (2,), "ep": (2,), "layout": ("grouped", "packed"), "symmetric_memory": (True,),
}  # fmt: skip
SYSTEMS = ("impl-fsdp1", "impl-fsdp2", "torch-fsdp1", "torch-fsdp2", "torch-ddp")
MODELS = ("gpt-tiny", "t5-tiny", "llama-tiny", "moe-tiny", "regnet-tiny")


def drawn(numbers: random.Random) -> Config:
    """A random configuration that its system can have: up to four settings are not at their default."""
    while True:
        names = numbers.sample(sorted(VALUES), numbers.randint(0, 4))
        settings = {name: numbers.choice(VALUES[name]) for name in names}
        with contextlib.suppress(Exception):  # impossible together
            config = configuration(numbers.choice(SYSTEMS), model=numbers.choice(MODELS), **settings)
            if not get_system(config.system).not_applicable(config):
                return config


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(150))
def test_in_random_configurations_neither(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = drawn(random.Random(seed))
    assert alike_seen_or_not(config, tmp_path, monkeypatch), config.name
