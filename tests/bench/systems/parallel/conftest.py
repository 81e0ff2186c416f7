"""Four gloo ranks for all tests of this folder: the pool of `tests/impl`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_POOL = Path(__file__).resolve().parents[3] / "impl" / "rank_pool.py"


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Any]:
    sys.path.insert(0, str(_POOL.parent))
    pool = importlib.import_module("rank_pool").RankPool(4)
    yield pool
    pool.stop()
