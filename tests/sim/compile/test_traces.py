"""Traces of Dynamo's on disk: taken where a process would make the same again, and nowhere else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.sim.compile.traces import can_be_kept

pytestmark = pytest.mark.skipif(not can_be_kept(), reason="another version of torch, or Dynamo is watched")

MODEL = """
import torch
from torch import nn

class Options:
    def __init__(self):
        self.times = 2

def activation(x):
    return torch.nn.functional.gelu(x)

def another(x):
    return torch.nn.functional.silu(x)

class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
    def forward(self, x):
        return activation(self.up(x))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
        self.inner, self.down = Inner(), nn.Linear(128, 64)
    def forward(self, x):
        return x + self.down(self.inner(x)) * self.options.times
"""

PROCESSES = """
import json, os, sys, torch
import model
from fsdpbench.sim import Simulation, load_profile
from fsdpbench.sim.compile.front_end import install, keep_traces
from fsdpbench.sim.compile.report import REPORT

install()
kept = keep_traces()
Simulation.start(load_profile("h100-80gb"), 1, 1)

def process(change):
    with torch.device("sim"):
        block, x = model.Block(), torch.randn(8, 64, requires_grad=True)
    named = {"block": block, "x": x, "torch": torch, "model": model}
    exec(change, named)
    block, x = named["block"], named["x"]
    block.compile()
    block(x).sum().backward() if torch.is_grad_enabled() else block(x)
    launches = [[each.name, each.nbytes] for plan in REPORT.plans for each in plan.launches]
    print(json.dumps([kept.found, kept.left, kept.why_not, launches, REPORT.to_dict()]), flush=True)

for change in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        process(change)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


class Processes:
    """Of one folder: each is forked from one server, so that objects have the same numbers in all of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "model.py").write_text(MODEL)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def run(self, *changes: str) -> list[list[Any]]:
        """By process: traces found and left, why not, launches, and the report."""
        given = json.dumps([textwrap.dedent(change) for change in changes])
        done = subprocess.run(
            [sys.executable, "-c", PROCESSES, given], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    @property
    def traces(self) -> list[Path]:
        return list((self.folder / "cache" / "traces").glob("*"))


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(tmp_path, monkeypatch)


def test_a_trace_is_taken_by_the_next_process(processes: Processes) -> None:
    """Also by one of another server, where strings hash otherwise; all that is told of it stays the same."""
    first, second = processes.run("", "")
    assert first[:3] == [0, 1, []]
    assert second[:3] == [1, 0, []]
    assert len(first[3]) >= 2
    assert second[3:] == first[3:]
    assert processes.run("")[0] == second


@pytest.mark.campaign
def test_a_step_without_backward_leaves_its_trace(processes: Processes) -> None:
    """It runs out of memory before, say."""
    without, first, second = processes.run("torch.Tensor.backward = lambda self: None", "", "")
    assert without[:3] == [0, 1, []]
    assert first[:3] == second[:3] == [1, 0, []]
    assert without[3:] == first[3:] == second[3:]


CHANGES = {
    "an object's attribute": "block.options.times = 3",
    "a function of the module": "model.activation = model.another",
    "a method of a class": "model.Inner.forward = lambda self, x: model.another(self.up(x))",
    "a hook inside": "block.inner.register_forward_hook(lambda module, args, out: out * 2)",
    "no gradients": "torch.set_grad_enabled(False)",
    "a mode": "model.Mode().__enter__()",
    "autocast": "torch.set_autocast_enabled('sim', True)",
    "an input": "x = torch.randn(16, 64, requires_grad=True, device='sim')",
    "of another dtype": "block, x = block.bfloat16(), x.detach().bfloat16().requires_grad_()",
    "no training": "block.eval()",
    "a frozen parameter": "block.down.bias.requires_grad_(False)",
}


@pytest.mark.campaign
def test_what_changes_a_trace_is_traced(processes: Processes) -> None:
    """Each change alone, after a process without it; and the trace without it is still there afterwards or
    made again, and says what it said."""
    first, *others, last = processes.run("", *CHANGES.values(), "")
    assert first[:3] == [0, 1, []]
    found = {name: each[0] for name, each in zip(CHANGES, others, strict=True)}
    assert found == dict.fromkeys(CHANGES, 0)
    by_words = dict(zip(CHANGES, others, strict=True))
    for name in ("an object's attribute", "a function of the module", "a method of a class"):
        assert by_words[name][2][0] == "NotKeptError: its guards say something else", name
    assert last[3:] == first[3:]


def test_sources_that_change_are_traced(processes: Processes) -> None:
    first = processes.run("")[0]
    path = processes.folder / "model.py"
    path.write_text(MODEL.replace("functional.gelu(x)", "functional.silu(x)"))
    changed = processes.run("")[0]
    assert changed[:2] == [0, 1]
    assert changed[3] != first[3]


@pytest.mark.campaign
@pytest.mark.parametrize("content", [b"", b"\x80\x04broken"], ids=["empty", "garbage"])
def test_broken_files_are_made_anew(processes: Processes, content: bytes) -> None:
    first = processes.run("")[0]
    for path in processes.traces:
        path.write_bytes(content)
    again, after = processes.run("", "")
    assert again[:2] == [0, 1]
    assert after[:2] == [1, 0]
    assert first[3:] == again[3:] == after[3:]


@pytest.mark.campaign
def test_an_object_s_number_is_its_meaning_however_small(processes: Processes) -> None:
    """Those of a Python without position-independent code have eight digits."""
    code = """
    from types import SimpleNamespace
    from fsdpbench.sim.compile.traces.guards import words_of
    from fsdpbench.sim.compile.traces.meaning import Meanings, NotKeptError
    words = [
        words_of(SimpleNamespace(guard_manager=f"size=[8, 64] {number})", numbered={number: int}), Meanings())
        for number in (31072800, 139796321851280)
    ]
    assert words[0] == words[1]
    assert words[0].startswith("size=[8, 64] class builtins.int")
    try:
        words_of(SimpleNamespace(guard_manager="139796321851280", numbered={}), Meanings())
    except NotKeptError:
        print("refused")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "refused\n"


@pytest.mark.campaign
def test_a_graph_that_is_gone_is_traced(processes: Processes) -> None:
    """Torch keeps it in a folder of its own."""
    first = processes.run("")[0]
    shutil.rmtree(processes.folder / "cache" / "aotautograd")
    again = processes.run("")[0]
    assert again[:2] == [0, 1]
    assert again[3] == first[3]
