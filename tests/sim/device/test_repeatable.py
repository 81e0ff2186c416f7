"""A configuration has the same record and trace in every process.

Processes differ in what no program may depend on: addresses, the seed of strings' hashes, the allocator of
Python, plans of the compiler that are on disk.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]
HERE = Path(__file__).parents[1]
DOCUMENTS = Path(__file__).parents[3] / "docs"
OF_THE_PROCESS = re.compile(rb'CompiledFxGraph \w+|"loader": *{[^}]*}')
"""Names of graphs, by Inductor's hash of their text, and the real time that a script's loader takes."""


def in_process(number: int, home: Path, *words: str) -> None:
    """Run a Python program in a new process that is unlike those of other numbers."""
    unlike = {
        "PYTHONHASHSEED": f"{17 * number + 1}",
        "PYTHONMALLOC": ("pymalloc", "malloc")[number % 2],
        "XDG_CACHE_HOME": str(home),
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    done = subprocess.run([sys.executable, *words], env=os.environ | unlike, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def written(folder: Path) -> dict[str, bytes]:
    """What runs wrote there: their records and traces."""
    found = {}
    for path in folder.rglob("rank0_*"):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        found[path.relative_to(folder).as_posix()] = OF_THE_PROCESS.sub(b"", content)
    return found


def different(folders: list[Path]) -> list[str]:
    """The files that are not in all folders, or not the same there."""
    first, *others = [written(folder) for folder in folders]
    assert first
    return sorted(
        name for other in others for name in first.keys() | other.keys() if first.get(name) != other.get(name)
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_configurations(seed: int, tmp_path: Path) -> None:
    folders = [tmp_path / f"{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        program = str(HERE / "drawn_configurations.py")
        in_process(10 * seed + number, tmp_path / "home", program, str(folder), f"{seed}", "15")
    assert different(folders) == []


@pytest.mark.parametrize("seed", range(10))
def test_random_compiled_configurations(seed: int, tmp_path: Path) -> None:
    """The first process finds no plans on disk."""
    folders = [tmp_path / f"{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        program = str(HERE / "drawn_configurations.py")
        in_process(10 * seed + number, tmp_path / "home", program, str(folder), f"{seed}", "5", "compiled")
    assert different(folders) == []


@pytest.mark.parametrize("script", ["train_fsdp1.py", "train_fsdp2.py", "train_ddp_amp.py", "train_t5.py"])
def test_scripts(script: str, tmp_path: Path) -> None:
    folders = [tmp_path / f"{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        words = ("-m", "fsdpbench", "run", "--script", str(DOCUMENTS / "examples" / script), "--gpus", "8")
        in_process(number, tmp_path / "home", *words, "--output", str(folder))
    assert different(folders) == []
