"""Host time of a simulated step; without `-n 0 --benchmark-enable`, that it steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LAYERS = 8
GPUS = 8


@pytest.fixture
def step(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """Runs one step of the system that the test is parametrised with, in a process of its own."""
    script = Path(__file__).with_name("stepping.py")
    command = [sys.executable, str(script), request.param, str(LAYERS), str(GPUS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout
        assert answers.readline() == "ready\n"

        def once() -> str:
            orders.write("step\n")
            orders.flush()
            return answers.readline()

        yield once
        orders.close()
        assert process.wait(timeout=20) == 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every system when timing; in the plain suite, where each only has to run, one."""
    timing = metafunc.config.getoption("benchmark_enable")
    systems = ("impl-fsdp1", "impl-fsdp2", "torch-fsdp1", "torch-fsdp2") if timing else ("impl-fsdp2",)
    metafunc.parametrize("step", systems, indirect=True)


def test_simulated_step(benchmark: Any, step: Callable[[], str]) -> None:
    assert benchmark.pedantic(step, rounds=30, warmup_rounds=2) == "stepped\n"
