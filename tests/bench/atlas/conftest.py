"""Cells whose results are made up, so that nothing is simulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdpbench.answers.atlas.space import Cell, Extent, cells, next_wave
from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.reports.result import Cause, Result, Status

EXTENT = Extent(("llama-tiny",), ("a100-80gb",), (8, 16))
Told = Callable[[Config], Result]


def _ran(rate: float, risky: bool = False) -> Result:
    """A result with a throughput and its interval."""
    return Result.of(
        {
            "status": "ok",
            "step_time_s": 1.0,
            "tokens_per_s_per_gpu": rate,
            "peak_memory_bytes": {"reserved": 2**30},
            "interval": {
                "tokens_per_s_per_gpu": [0.9 * rate, 1.1 * rate],
                "peak_memory_bytes": {"reserved": [2**29, 2**31]},
                "risky": risky,
                "because": ["of this"],
                "level": 0.9,
                "step_time_s": [0.9, 1.1],
            },
        }
    )


def _out_of_memory() -> Result:
    return Result(status=Status.OOM, cause=Cause("CUDA out of memory. Tried to allocate 2 GiB"))


@pytest.fixture(scope="session")
def ran() -> Callable[..., Result]:
    return _ran


@pytest.fixture(scope="session")
def out_of_memory() -> Callable[[], Result]:
    return _out_of_memory


@pytest.fixture(scope="session")
def two_cells() -> list[Cell]:
    return cells(EXTENT)


@pytest.fixture(scope="session")
def worked_off() -> Callable[[list[Cell], Told], dict[str, Result]]:
    """The results of cells whose configurations come out as `told` says, tried as the build tries them."""

    def work_off(found: list[Cell], told: Told) -> dict[str, Result]:
        results: dict[str, Result] = {}
        while wave := next_wave(found, results):
            results |= {content_key(config): told(config) for config in wave}
        return results

    return work_off
