"""A builder of small Kineto traces whose truth is known, and the folder of real ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trace_writing import TraceBuilder, build_fsdp_trace


@pytest.fixture
def trace_builder() -> type[TraceBuilder]:
    return TraceBuilder


@pytest.fixture
def fsdp_trace() -> TraceBuilder:
    return build_fsdp_trace()


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """The folder of real traces that lies beside the repository, where it does."""
    root = Path(__file__).resolve().parents[3]
    shared = Path(os.environ.get("FSDPBENCH_SHARED", root / "../shared"))
    folder = shared / "data" / "traces"
    if not folder.is_dir():
        pytest.skip(f"no real traces at {folder} (FSDPBENCH_SHARED names their parent)")
    return folder
