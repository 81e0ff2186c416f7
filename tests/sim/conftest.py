"""Tests marked ``simulated`` run in a fork that has the simulated device (see simulation_server.py)."""

from __future__ import annotations

import csv
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAMPLES = Path(__file__).parents[1] / "data"
_SAMPLE_OF = {
    "gemm_tables.csv": "gemm_sample.csv",
    "fa_fwd_tables.csv": "attention_sample.csv",
    "nccl_intranode_tables.csv": "nccl_sample.csv",
}


class SimulationServer:
    """The process that forks one process a test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "simulation_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, file: Path, function: str, arguments: dict[str, object]) -> str | None:
        """Run a test; the text of its failure, or None."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((str(file), function, arguments), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="session")
def simulation_server() -> Iterator[SimulationServer]:
    """One server for all tests of the simulator."""
    server = SimulationServer()
    yield server
    server.stop()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simulated: runs in a process of its own with the simulated device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("simulated") and isinstance(item, pytest.Function):
            item.fixturenames.append("simulation_server")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("simulated") is None:
        return None
    server = pyfuncitem.funcargs["simulation_server"]
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    failure = server.run(pyfuncitem.path, pyfuncitem.function.__name__, arguments)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.fixture
def measured_table() -> Callable[[str], list[dict[str, str]]]:
    """Reads a table of measured operator times: its sample, or all of it where FSDPBENCH_SHARED has it."""

    def read(name: str) -> list[dict[str, str]]:
        whole = os.environ.get("FSDPBENCH_SHARED")
        path = SAMPLES / _SAMPLE_OF[name] if whole is None else Path(whole) / "data" / name
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    return read
