"""Run folders for the tests of the page, and a browser to open it in."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fsdpbench.reports.pages import write_report


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module that makes up run folders."""
    path = Path(__file__).with_name("synthetic_sweep.py")
    spec = importlib.util.spec_from_file_location("page_synthetic_sweep", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up by its name.
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sweep(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of 30 configurations with traces; read only."""
    return synthetic.write_sweep(tmp_path_factory.mktemp("runs") / "gpt-2.8b-8x-a100-80gb")


@pytest.fixture(scope="session")
def many(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 200 configurations with a model of 48 blocks."""
    run = tmp_path_factory.mktemp("many") / "run"
    first = synthetic.write_point(run, next(synthetic.space()), 0, blocks=48)
    for number in range(1, 200):
        shutil.copytree(first, run / f"{first.name[:-8]}{number:08x}")
    return write_report(run)


@pytest.fixture
def copy(sweep: Path, tmp_path: Path) -> Path:
    """The sweep without its traces, to be changed."""
    return Path(shutil.copytree(sweep, tmp_path / "run", ignore=shutil.ignore_patterns("trace")))
