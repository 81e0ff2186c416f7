"""A builder of small Kineto traces whose truth is known, and traces that look as real ones do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from real_shapes import write_all
from trace_writing import TraceBuilder, build_fsdp_trace


@pytest.fixture
def trace_builder() -> type[TraceBuilder]:
    return TraceBuilder


@pytest.fixture
def fsdp_trace() -> TraceBuilder:
    return build_fsdp_trace()


@pytest.fixture(scope="session")
def real_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces that look as those from elsewhere do; real ones where FSDPBENCH_SHARED has them."""
    shared = os.environ.get("FSDPBENCH_SHARED")
    if shared is not None:
        return Path(shared) / "data" / "traces"
    return write_all(tmp_path_factory.mktemp("traces"))
