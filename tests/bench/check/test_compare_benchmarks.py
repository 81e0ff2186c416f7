"""`ci/compare_benchmarks.py` on files as pytest-benchmark writes them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Main = Callable[[list[str]], int]
SCRIPT = Path(__file__).parents[3] / "ci" / "compare_benchmarks.py"


def saved(path: Path, seconds: dict[str, list[float]], cores: int = 2) -> str:
    """A --benchmark-json file of the fields that count."""
    content = {
        "machine_info": {"python_version": "3.11.7", "cpu": {"brand_raw": "a processor", "count": cores}},
        "benchmarks": [{"fullname": name, "stats": {"data": data}} for name, data in seconds.items()],
    }
    path.write_text(json.dumps(content))
    return str(path)


def rounds(seed: int, factor: float = 1.0) -> list[float]:
    """20 rounds of a millisecond with a long tail."""
    return (factor * 1e-3 * (1 + np.random.default_rng(seed).exponential(0.02, 20))).tolist()


@pytest.fixture(scope="module")
def main() -> Main:
    """The script's own."""
    spec = importlib.util.spec_from_file_location("compare_benchmarks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_a_slower_benchmark_is_named(tmp_path: Path, main: Main, capsys: Any) -> None:
    before = saved(tmp_path / "a.json", {"test_step": rounds(1), "test_read": rounds(2)})
    after = saved(tmp_path / "b.json", {"test_step": rounds(3, 1.1), "test_read": rounds(4)})
    assert main([before, after]) == 1
    told = capsys.readouterr().out
    assert "slower  test_step" in told
    assert "noise  test_read" in told
    assert "note: one file a side" in told
    assert main([before, before]) == 0


def test_with_several_files_the_run_is_the_replicate(tmp_path: Path, main: Main, capsys: Any) -> None:
    before = [saved(tmp_path / f"a{k}.json", {"test_step": rounds(k)}) for k in range(6)]
    after = [saved(tmp_path / f"b{k}.json", {"test_step": rounds(9 + k, 1.1)}) for k in range(6)]
    assert main([",".join(before), ",".join(after)]) == 1
    assert main([",".join(before[:3]), ",".join(after[:3])]) == 3
    assert "5 are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "cores", "code", "said"),
    [
        ({"test_step": [1.0] * 20}, 64, 3, "cores: 2 against 64"),
        ({"test_other": [1.0] * 20}, 2, 3, "no benchmark is on both sides"),
        ({"test_step": []}, 2, 2, "not a --benchmark-json file with its rounds"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    tmp_path: Path, main: Main, capsys: Any, seconds: dict[str, list[float]], cores: int, code: int, said: str
) -> None:
    before = saved(tmp_path / "a.json", {"test_step": rounds(1)})
    assert main([before, saved(tmp_path / "b.json", seconds, cores)]) == code
    assert said in capsys.readouterr().err
