"""Host time of a step, timed: `pytest -n 0 tests/impl/benchmarks --benchmark-enable`.

24 units and a root under a fake group of eight on the CPU, so that nearly all of the time is the host's. What
a unit costs is the difference to the plain model's time, divided by 24. Off in the plain suite, where it runs
once.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from host_cases import SYSTEMS, build, fake_group, forget_gradients, step


@pytest.fixture
def group() -> Iterator[None]:
    with fake_group():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every size when timing; in the plain suite, where each only has to run, one."""
    sizes = (4, 12, 36) if metafunc.config.getoption("benchmark_enable") else (12,)
    cases = [("plain", size, False) for size in sizes]
    cases += [(system, size, low) for system in SYSTEMS for size in sizes for low in (False, True)]
    metafunc.parametrize(("system", "parameters", "low_precision"), cases)


def test_step(benchmark, group, system: str, parameters: int, low_precision: bool) -> None:
    model, batch = build(system, parameters, low_precision), torch.ones(4, 16)
    for _ in range(3):
        step(model, batch)
        forget_gradients(model)
    gc.collect()
    benchmark.pedantic(step, (model, batch), setup=lambda: forget_gradients(model), rounds=20)
    assert torch.isfinite(model(batch)).all()
