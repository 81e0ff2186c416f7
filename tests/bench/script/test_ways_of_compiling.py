"""`torch.compile` as users call it in scripts: as on the CPU, or refused by name with the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.campaign
WAYS = Path(__file__).parent / "ways_of_compiling.py"
REFUSED = {
    "region": ("CompileRefusedError", "nested_compile_region", "ways_of_compiling.py", "as it is"),
    "cudagraphs": ("CompileRefusedError", 'backend="cudagraphs"', "reduce-overhead"),
}


STEPS = ("optimizer", "optimizer_of_its_own", "whole_step")
"""Their breaks differ: what watches an optimizer's step breaks the graph before it."""


def graphs(words: str) -> str:
    return words.partition(",")[0]


def lines(output: str) -> dict[str, str]:
    told = (line.split(" ", 2) for line in output.splitlines() if line.startswith("CASE "))
    return {name: words for _, name, words in told}


def test_as_on_the_cpu(run_script: RunScript) -> None:
    """Graphs and breaks; what is raised is raised on both."""
    on_cpu = subprocess.run([sys.executable, str(WAYS), "cpu"], capture_output=True, text=True, check=True)
    run = run_script(WAYS, "cuda", to_the_end=True)

    simulated, real = lines(run.output), lines(on_cpu.stdout)
    assert len(real) == 26
    assert {name: graphs(words) for name, words in simulated.items()} == {
        name: graphs(words) for name, words in real.items()
    }
    for name in STEPS:
        assert simulated.pop(name) != real.pop(name), f"{name} breaks as on the CPU now: compare it"
    assert simulated == real
    notes = "\n".join(run.result["script"]["notes"])
    assert "gave up forward" in notes
    assert "'aot_eager', 'eager'" in notes


def test_refused_by_name(run_script: RunScript) -> None:
    found = lines(run_script(WAYS, "cuda", *REFUSED).output)
    for name, words in REFUSED.items():
        assert all(word in found[name] for word in words), found[name]


def test_a_refusal_that_the_script_suppresses_is_told(run_script: RunScript) -> None:
    run = run_script(WAYS, "cuda", "suppressed")
    assert any("nested_compile_region" in note for note in run.result["script"]["notes"])
