"""A simulated script sees the files that plain Python would show it, and leaves what was there before."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdpbench.script.files.overlay import holds_arrays

if TYPE_CHECKING:
    from conftest import RunScript, ScriptRun

PROGRAMS = Path(__file__).with_name("file_programs.py")


def _plainly(*arguments: object) -> list[str]:
    words = [sys.executable, str(PROGRAMS), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def _compare(run_script: RunScript, tmp_path: Path, first: int, last: int) -> None:
    plain, simulated, untouched = (tmp_path / name for name in ("plain", "simulated", "untouched"))
    wanted = _plainly(plain, first, last, "lay", simulated, untouched)
    run = run_script(PROGRAMS, str(simulated), str(first), str(last), "cuda", to_the_end=True)
    found = run.output.splitlines()
    _check_seen(first, wanted, found)
    assert len(found) == last - first, run.cause
    for seed in range(first, last):
        _check_what_is_left(run, untouched / str(seed), plain / str(seed), simulated / str(seed))


def _check_seen(first: int, wanted: list[str], found: list[str]) -> None:
    for seed, expected, seen in zip(itertools.count(first), wanted, found, strict=False):
        for number, (one, other) in enumerate(zip(json.loads(expected), json.loads(seen), strict=True)):
            assert _named(other) == _named(one), f"sequence {seed}, operation {number}"


def _named(step: list[Any]) -> list[Any]:
    """Return what an operation saw, less files with names that `tempfile` drew."""
    operation, seen = step
    if isinstance(seen, dict):
        seen = {name: each for name, each in seen.items() if not Path(name).name.startswith("tmp")}
    return [operation, seen]


def _compare_layer(in_forks: Any, tmp_path: Path, first: int, last: int) -> None:
    """Compare sequences without a simulated device, which costs a tenth of the time."""
    plain, layered = tmp_path / "plain", tmp_path / "layered"
    wanted = _plainly(plain, first, last, "lay", layered)
    program = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = (PROGRAMS, layered, first, last, "layer", tmp_path / "runs")
    (done,) = in_forks(program, [[str(word) for word in words]])
    found = done.stdout.splitlines()
    _check_seen(first, wanted, found)
    assert len(found) == last - first, done.stderr


def _check_what_is_left(run: ScriptRun, untouched: Path, plain: Path, simulated: Path) -> None:
    """Check that no file in place holds simulated tensors, that no checkpoint was changed, and that what the
    script wrote otherwise is there, or in the run's folder beside tensors."""
    real = {path.read_bytes() for path in untouched.rglob("*.pt")}
    for path in simulated.rglob("*"):
        if path.is_file() and holds_arrays(str(path)):
            assert path.read_bytes() in real, f"{path} holds simulated tensors"
    for old in untouched.rglob("*.pt"):
        there = simulated / old.relative_to(untouched)
        assert there.read_bytes()[:2] == b"P:" or there.read_bytes() == old.read_bytes(), there
    for path in plain.rglob("*"):
        if path.is_file() and path.read_bytes()[:2] == b"P:":
            there = simulated / path.relative_to(plain)
            kept = run.written(there)
            assert path.read_bytes() in [each.read_bytes() for each in (there, kept) if each.is_file()], there


def test_drawn_sequences(run_script: RunScript, tmp_path: Path) -> None:
    _compare(run_script, tmp_path, 0, 24)


def test_drawn_sequences_through_the_layer(in_forks: Any, tmp_path: Path) -> None:
    _compare_layer(in_forks, tmp_path, 0, 24)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_many_drawn_sequences(run_script: RunScript, tmp_path: Path, first: int) -> None:
    _compare(run_script, tmp_path, first, first + 500)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(3000, 7000, 500))
def test_many_drawn_sequences_through_the_layer(in_forks: Any, tmp_path: Path, first: int) -> None:
    _compare_layer(in_forks, tmp_path, first, first + 500)
