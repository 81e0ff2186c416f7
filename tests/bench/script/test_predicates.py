"""What a script asks torch is answered alike in eager and in compiled code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

PREDICATES = Path(__file__).parent / "predicates.py"


def answers(output: str) -> dict[str, list[str]]:
    """Answers by predicate: eager, compiled, compiled as one graph."""
    asked = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("ASKED ")]
    return {name: found for name, *found in asked}


@pytest.mark.campaign
def test_every_predicate(run_script: RunScript) -> None:
    """A predicate breaks a graph only where it does so on the CPU."""
    on_cpu = answers(subprocess.run([sys.executable, str(PREDICATES), "cpu"], capture_output=True, text=True,
                                    check=True).stdout)  # fmt: skip
    found = answers(run_script(PREDICATES, "cuda", to_the_end=True).output)
    assert len(found) > 60
    assert {name: each for name, each in found.items() if each[0] != each[1]} == {}
    breaks = {name for name, (eager, _, whole) in found.items() if eager != whole}
    alike = {name for name, (eager, _, whole) in on_cpu.items() if eager != whole}
    # Answers that only a GPU has: torch names these functions as breaking a graph, or does not know them.
    of_gpus = {name for name in breaks if name not in on_cpu} | {"torch.cuda.get_arch_list()"}
    assert breaks - alike - of_gpus == set()


def test_autocast_in_one_graph(run_probe: RunScript) -> None:
    run = run_probe(
        """
        class Layer(torch.nn.Linear):
            def forward(self, x):
                if torch.is_autocast_enabled():
                    x = x.to(torch.get_autocast_gpu_dtype())
                assert torch.is_autocast_enabled("cuda") == torch.is_autocast_enabled()
                return super().forward(x).float()
        model = torch.nn.Sequential(Layer(64, 64), Layer(64, 64)).cuda()
        for layer in model:
            layer.compile(fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled=step > 0):
                model(torch.randn(8, 64, device="cuda")).float().sum().backward()
            optimizer.step()
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert run.result["compilation"]["graph_breaks"] == {}
