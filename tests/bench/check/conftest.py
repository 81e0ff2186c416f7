"""Sweeps with planted regressions, run once for all tests, and the pool of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.engine.results.records import Status


@pytest.fixture(scope="session")
def planted(in_forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sweeps: `base`, and one for each regression (see planted_sweeps.py)."""
    folder = tmp_path_factory.mktemp("planted")
    script = Path(__file__).with_name("planted_sweeps.py")
    program = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    (done,) = in_forks(program, [[str(script), str(folder)]], timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def pool() -> list[dict[str, float | None]]:
    """The gate's figures of each run that `ci/record_pool.py` recorded."""
    path = Path(__file__).parents[3] / "ci" / "measured" / "cpu_pool.json"
    recorded: dict[str, Any] = json.loads(path.read_text())
    runs: list[dict[str, float | None]] = []
    for run in recorded["runs"]:
        steps = sorted(run["step_times_s"])
        runs.append({"step_time_s": steps[len(steps) // 2], "fastest_step_s": steps[0]})
    return runs


@pytest.fixture
def measured() -> Any:
    """Makes an entry of runs on the CPU."""
    return lambda runs: Entry(Status.OK, "cpu", tuple(runs))
