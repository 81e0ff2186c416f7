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


def test_they_are_whole_graphs(run_script: RunScript) -> None:
    names = ("arange", "tensor", "type", "cuda()", "cuda_avail")
    assert lines(run_script(LINES, "cuda", *names).output) == [f"CASE {name} 1 []" for name in names]


@pytest.mark.campaign
def test_breaks_are_those_of_the_cpu(run_script: RunScript) -> None:
    on_cpu = subprocess.run([sys.executable, str(LINES), "cpu"], capture_output=True, text=True, check=True)
    found = lines(run_script(LINES, "cuda").output)

    assert found == lines(on_cpu.stdout)
    assert len(found) == 55
