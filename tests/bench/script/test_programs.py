"""Training programs as people write them: each file of `programs` runs as it is, or is refused by name, and
each of `ci/programs/small` that says what it prints.

A comment `# prints: TEXT` in a program is a part of what it prints, `# cause: TEXT` says with which words it
has to be refused, and `# cause with --sanitize: TEXT` with which words the sanitizer refuses it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conftest import RunScript, ScriptRun

FOLDER = Path(__file__).with_name("programs")
OTHERS = Path(__file__).parents[3] / "ci" / "programs" / "small"
PRINTS = "# prints: "
FILES = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "tiny"} | {
    path.stem: path for path in OTHERS.glob("*.py") if PRINTS in path.read_text()
}
PROGRAMS = sorted(FILES)
QUICK = ("pipeline_refused", "scaler_fp16", "ends_as_python", "join_jagged")


def run_in(folder: Path, name: str, run_script: RunScript, **options: object) -> ScriptRun:
    """Run a program in a folder of its own, where it writes its files."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run_script(FILES[name], **options)
    finally:
        os.chdir(before)


def refused_with(name: str, mark: str = "# cause: ") -> str | None:
    return next(iter(marked(name, mark)), None)


def marked(name: str, mark: str) -> list[str]:
    lines = FILES[name].read_text().splitlines()
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def check(run: ScriptRun, text: str | None, prints: Sequence[str] = ()) -> None:
    if text is None:
        assert run.result["status"] == "ok", run.cause
        assert run.result["step_time_s"] > 0
        assert [each for each in prints if each not in run.output] == []
    else:
        assert run.result["status"] == "error"
        assert text in run.cause


@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, run_script: RunScript, tmp_path: Path) -> None:
    check(run_in(tmp_path, name, run_script, to_the_end=True), refused_with(name), marked(name, PRINTS))


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in QUICK])
def test_to_the_end(name: str, run_script: RunScript, tmp_path: Path) -> None:
    check(run_in(tmp_path, name, run_script, to_the_end=True), refused_with(name), marked(name, PRINTS))


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in PROGRAMS if refused_with(name) is None])
def test_no_false_alarm(name: str, run_script: RunScript, tmp_path: Path) -> None:
    run = run_in(tmp_path, name, run_script, to_the_end=True, sanitize=True)
    refused = refused_with(name, "# cause with --sanitize: ")
    check(run, refused)
    assert refused or run.result["sanitizer"]["findings"] == []
