"""What Dynamo makes of a script's lines is what it makes of them on the CPU: no simulator is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

LINES = Path(__file__).parent / "compiled_lines.py"


def lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("CASE ")]


@pytest.mark.plain_cases("few")
@pytest.mark.parametrize(
    "names",
    [("arange", "tensor", "type", "cuda()", "cuda_avail", "item"), ()],
    ids=["few", "all"],
)
def test_breaks_are_those_of_the_cpu(names: tuple[str, ...], run_script: RunScript) -> None:
    on_cpu = subprocess.run(
        [sys.executable, str(LINES), "cpu", *names], capture_output=True, text=True, check=True
    )
    run = run_script(LINES, "cuda", *names)

    assert lines(run.output) == lines(on_cpu.stdout)
    assert len(lines(run.output)) == (len(names) or 55)
