"""One package is installed; from the repository root its folders can be imported by their bare names too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SAME_OBJECTS = """
import importlib, pkgutil, sys
{first}
for top in ("impl", "workloads", "reports"):
    bare, real = importlib.import_module(top), importlib.import_module(f"fsdpbench.{{top}}")
    assert bare is real, top
    found = pkgutil.walk_packages(real.__path__, f"fsdpbench.{{top}}.")
    names = [each.name.removeprefix(f"fsdpbench.{{top}}.") for each in found]
    for name in names:
        module = importlib.import_module(f"{{top}}.{{name}}")
        assert module is importlib.import_module(f"fsdpbench.{{top}}.{{name}}"), name
        assert module.__name__ == module.__spec__.name == f"fsdpbench.{{top}}.{{name}}", module.__spec__
    assert len(names) > 10, names
from impl.fsdp2.fully_shard import fully_shard
import fsdpbench.impl
assert fully_shard is fsdpbench.impl.fully_shard
print("same")
"""


def python(*words: str, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "first",
    [
        "import impl.runtime.unit",
        pytest.param("import fsdpbench.impl.runtime.unit", marks=pytest.mark.campaign),
    ],
    ids=["bare", "full"],
)
def test_both_names_mean_the_same_module_objects(first: str) -> None:
    done = python("-c", SAME_OBJECTS.format(first=first), cwd=ROOT)
    assert done.stdout == "same\n", done.stderr


SCRIPT = """
import impl, reports, workloads
from torch import nn, optim
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

assert (impl.WHOSE, reports.WHOSE, workloads.WHOSE) == ("mine", "mine", "mine")
dist.init_process_group()
model = nn.Linear(8, 8, device="cuda")
fully_shard(model)
optimizer = optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with modules that bear our folders' names, and a script that imports them."""
    for name in ("impl", "reports", "workloads"):
        (tmp_path / f"{name}.py").write_text("WHOSE = 'mine'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.campaign
def test_a_users_own_modules_of_these_names_are_his(folder: Path) -> None:
    words = ("run", "--device", "sim", "--gpus", "2", "-o", str(folder / "runs"))
    of_script = python("-m", "fsdpbench", *words, "--script", "train.py", cwd=folder, path=".")
    assert of_script.returncode == 0, of_script.stdout + of_script.stderr


@pytest.mark.campaign
def test_the_wheel_installs_one_package_that_does_what_the_clone_does(folder: Path) -> None:
    wheels, site = folder / "wheels", folder / "site"
    pip = ("-m", "pip", "--disable-pip-version-check")
    built = python(*pip, "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT), cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    done = python(*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} <= {"fsdpbench", "bin"}
    where = python("-c", "import fsdpbench.impl as i; print(i.__file__)", cwd=folder, path=str(site))
    assert where.stdout.startswith(str(site)), where.stdout + where.stderr
    sweep = ("sweep", "--model", "gpt-tiny", "--gpus", "2", "--batch", "1,2", "-o", str(folder / "runs"))
    for words in (sweep, ("list", "hardware"), ("doctor",), ("run", "--script", "train.py", "--gpus", "2")):
        done = python("-m", "fsdpbench", *words, cwd=folder, path=f"{site}{os.pathsep}.")
        assert done.returncode == 0, (words, done.stdout + done.stderr)
    assert (folder / "runs" / "report.html").stat().st_size > 100_000
