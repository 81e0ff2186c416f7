"""`ci/run_benchmarks.py`: suites run in their own checkout, sides take turns, the comparison decides."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "ci" / "run_benchmarks.py"
SUITE = """
import where
def test_here(benchmark):
    assert where.HERE == {name!r}
    benchmark.pedantic(lambda: None, rounds=3)
def test_elsewhere(benchmark):
    assert False
"""


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_benchmarks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_suite_runs_with_its_checkouts_sources_and_says_whether_it_passed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "where.py").write_text("HERE = 'in the checkout'")
    (tmp_path / "test_suite.py").write_text(SUITE.format(name="in the checkout"))
    monkeypatch.setattr(script, "SUITES", ("test_suite.py",))
    monkeypatch.setattr(script, "QUICK", "test_here")
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # it would take itself for this one's worker, and save nothing
    file = tmp_path / "saved.json"
    assert script.run_suites(tmp_path, file, quick=True)
    (found,) = json.loads(file.read_text())["benchmarks"]
    assert found["name"] == "test_here"
    assert not script.run_suites(tmp_path, file, quick=False)
    assert "test_elsewhere" in capsys.readouterr().err


@pytest.fixture
def order(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sides in the order in which they ran; `before`, in `tmp_path`, takes 2 ms, this checkout 1 ms."""
    ran: list[str] = []

    def run_suites(checkout: Path, file: Path, *, quick: bool) -> bool:
        before = checkout == tmp_path
        ran.append("before" if before else "after")
        seconds = [(2e-3 if before else 1e-3) * (1 + k / 1000) for k in range(20)]
        machine = {"python_version": "3.11.7", "cpu": {"brand_raw": "a processor", "count": 2}}
        benchmarks = [{"fullname": "test_step", "stats": {"data": seconds}}]
        file.write_text(json.dumps({"machine_info": machine, "benchmarks": benchmarks}))
        return True

    monkeypatch.setattr(script, "run_suites", run_suites)
    return ran


def test_sides_take_turns_and_a_faster_one_is_no_fault(
    script: ModuleType, order: list[str], tmp_path: Path, capfd: Any
) -> None:
    assert script.main(["--base", str(tmp_path), "--rounds", "5"]) == 0
    assert order == ["before", "after", "after", "before"] * 2 + ["before", "after"]
    assert "faster  test_step" in capfd.readouterr().out


def test_a_suite_that_fails_ends_it(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(script, "run_suites", lambda *_, **__: False)
    assert script.main(["--base", str(tmp_path)]) == 5
    assert f"the suites fail in {tmp_path}" in capsys.readouterr().err
