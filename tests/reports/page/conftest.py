"""Run folders for the tests of the page, and a browser to open it in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


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
