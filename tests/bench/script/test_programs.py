"""Training programs as people write them: each file of `programs` runs as it is, or is refused by name.

A comment `# cause: TEXT` in a program says with which words it has to be refused, and one with
`# cause with --sanitize: TEXT` with which words the sanitizer refuses it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript, ScriptRun

FOLDER = Path(__file__).with_name("programs")
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tiny")
QUICK = ("pipeline_refused", "scaler_fp16")


def run_in(folder: Path, name: str, run_script: RunScript, **options: object) -> ScriptRun:
    """Run a program in a folder of its own, where it writes its files."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run_script(FOLDER / f"{name}.py", **options)
    finally:
        os.chdir(before)


def refused_with(name: str, mark: str = "# cause: ") -> str | None:
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    return next((line.removeprefix(mark) for line in lines if line.startswith(mark)), None)


def check(run: ScriptRun, text: str | None) -> None:
    if text is None:
        assert run.result["status"] == "ok", run.cause
        assert run.result["step_time_s"] > 0
    else:
        assert run.result["status"] == "error"
        assert text in run.cause


@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, run_script: RunScript, tmp_path: Path) -> None:
    check(run_in(tmp_path, name, run_script, to_the_end=True), refused_with(name))


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in QUICK])
def test_to_the_end(name: str, run_script: RunScript, tmp_path: Path) -> None:
    check(run_in(tmp_path, name, run_script, to_the_end=True), refused_with(name))


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in PROGRAMS if refused_with(name) is None])
def test_no_false_alarm(name: str, run_script: RunScript, tmp_path: Path) -> None:
    run = run_in(tmp_path, name, run_script, to_the_end=True, sanitize=True)
    refused = refused_with(name, "# cause with --sanitize: ")
    check(run, refused)
    assert refused or run.result["sanitizer"]["findings"] == []
