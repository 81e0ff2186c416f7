"""Writes dumps as files."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

WriteDumps = Callable[..., dict[int, Path]]


@pytest.fixture
def write_dumps(tmp_path: Path) -> WriteDumps:
    """`write_dumps({rank: dump})`: the files, by rank."""

    def write(dumps: dict[int, dict[str, Any]]) -> dict[int, Path]:
        paths = {rank: tmp_path / f"nccl_trace_rank_{rank}" for rank in dumps}
        for rank, content in dumps.items():
            paths[rank].write_bytes(pickle.dumps(content, protocol=2))
        return paths

    return write
