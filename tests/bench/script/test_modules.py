"""`run --module`: a module of a package, as `torchrun -m` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import ScriptSource, StepsBy, file_of_module
from fsdpbench.base.errors import UsageError
from fsdpbench.engine.results.provenance import run_command

TRAIN = """
import sys
import time
from .model import make
import torch

if __name__ == "__main__":
    model = make().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(7):
        began = time.time()
        model(torch.randn(4096, 8192, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        print("step", time.time() - began, sys.argv[1:])
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise_nothing = 1\n")
    (folder / "__init__.py").write_text("")
    (folder / "model.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(8192, 8192)\n")
    (folder / "train.py").write_text(TRAIN)
    (folder / "__main__.py").write_text("from . import train\n")
    return tmp_path


@pytest.mark.campaign
def test_a_module_runs_with_its_package(package: Path) -> None:
    words = ("--module", "mine.inner.train", "--gpus", "8", "--json", "-o", "runs", "--", "--lr", "1")
    command = [sys.executable, "-m", "fsdpbench", "run", *words]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert Path(result["folder"]).name.startswith("mine.inner.train-8x-a100-80gb-")
    output = (package / result["folder"] / "stdout.log").read_text().splitlines()
    assert all(line.endswith("['--lr', '1']") for line in output)
    # Its clock is simulated although it lies two folders below the one that it is run in.
    assert float(output[4].split()[1]) == pytest.approx(result["step_time_s"], rel=0.05)
    again = run_command(Config.from_dict(result["config"]))
    assert again.startswith("fsdpbench run --module mine.inner.train --hardware a100-80gb --gpus 8")


@pytest.mark.parametrize(
    ("name", "file"),
    [("mine.inner.train", "mine/inner/train.py"), ("mine.inner", "mine/inner/__main__.py")],
)
def test_its_file_is_found_without_importing_it(
    name: str, file: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package)
    path = file_of_module(name)
    assert path == package / file
    assert "mine" not in sys.modules
    source = ScriptSource.read(path, (), StepsBy.OPTIMIZER, to_the_end=False, module=name)
    assert source.own_folder == package / "mine"
    assert msgspec.convert(source.to_dict(), ScriptSource) == source


@pytest.mark.parametrize("name", ["", "nowhere.train", "mine", "mine.inner.nothing", ".train"])
def test_what_is_not_there_is_told(name: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    with pytest.raises(UsageError, match=f"--module '{name}': "):
        file_of_module(name)


def test_a_script_s_own_files_lie_beside_it(package: Path) -> None:
    path = package / "mine" / "inner" / "train.py"
    source = ScriptSource.read(path, (), StepsBy.OPTIMIZER, to_the_end=False)
    assert source.own_folder == path.parent
