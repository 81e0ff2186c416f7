"""What is imported when: nothing heavy before the fork server is started, nothing of torch after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_IMPORTED = (
    "import sys, fsdpbench.cli.commands.{name}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
)


@pytest.mark.parametrize("name", ["run", "sweep", "plan", "tune", "check", "validate"])
def test_commands_that_start_points_load_nothing_heavy_first(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED.format(name=name)], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"


_POINT = """
import sys, fsdpbench.launch.preload, simulated_runs
before = {{*sys.modules, "torch._dynamo"}}  # a stand-in takes this name
simulated_runs.run("{system}", activation_checkpointing="full")
print(sorted(name for name in {{*sys.modules}} - before if name.startswith(("torch.", "fsdpbench."))))
"""
_PLANNED = """
import sys
import fsdpbench.answers.explain, fsdpbench.answers.tune.run, fsdpbench.lab.expect, fsdpbench.sweep.runner
from fsdpbench.base.settings import Settings
from fsdpbench.systems import get_system
from fsdpbench.sweep.planning import make_config, make_target
target = make_target(model="gpt-tiny", device="sim", gpus=8)
for name in ("torch-fsdp2", "torch-fsdp1", "impl-fsdp2", "impl-fsdp1", "torch-ddp"):
    get_system(name).not_applicable(make_config(target, name, Settings.of(), target.workload()))
print("torch" in sys.modules)
"""


def test_planning_does_not_import_what_only_training_needs() -> None:
    done = subprocess.run([sys.executable, "-c", _PLANNED], capture_output=True, text=True, timeout=120)

    assert done.stdout == "False\n", done.stderr


@pytest.mark.plain_cases("impl-fsdp2")
@pytest.mark.parametrize("system", ["impl-fsdp2", "impl-fsdp1"])
def test_points_import_no_more_than_the_server_has(system: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "sim/software")}
    command = [sys.executable, "-c", _POINT.format(system=system)]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    assert done.stdout == "[]\n", done.stderr


def test_who_imports_what_the_server_has_keeps_its_own_end() -> None:
    """A job of Slurm does, and its exit code says whether it failed."""
    program = """
import signal, sys
import fsdpbench.launch.preload
sys.exit(3 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 4)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)

    assert done.returncode == 3, done.stderr
