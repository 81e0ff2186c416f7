"""`results.sqlite`

The record's figures in one table, for queries. Made from the folders, thrown away at will.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdpbench.settings import SETTINGS
from fsdpbench.store import StoredPoint

_FIGURES = (
    "step_time_s",
    "samples_per_s_per_gpu",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
    "alloc_retries_per_step",
    "ooms",
    "traced_step_time_s",
    "overlap_fraction",
)
_MEMORY = ("allocated", "active", "reserved")
_TIMES = ("compute_only", "overlapped", "exposed_communication", "idle")
_PLACE = ("model", "system", "device", "hardware", "gpus", "gpus_per_node")


def build_index(path: Path, points: Iterable[StoredPoint]) -> None:
    """Write the index of `points` to `path`, whole or not at all."""
    columns = ["folder", "name", "key", *_PLACE, "status", "cause", *SETTINGS, *_FIGURES]
    columns += [f"peak_{name}_bytes" for name in _MEMORY] + [f"time_{name}_s" for name in _TIMES] + ["result"]
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    connection = sqlite3.connect(partial)
    try:
        quoted = ", ".join(f'"{column}"' for column in columns)
        connection.execute(f"CREATE TABLE results ({quoted})")
        marks = ", ".join("?" * len(columns))
        connection.executemany(f"INSERT INTO results VALUES ({marks})", [_row(point) for point in points])
        connection.commit()
    finally:
        connection.close()
    os.replace(partial, path)


def _row(point: StoredPoint) -> list[Any]:
    config, result = point.config, point.result
    cause = (result.get("cause") or {}).get("message")
    memory, times = result.get("peak_memory_bytes") or {}, result.get("time_s") or {}
    row: list[Any] = [point.folder.name, config["name"], point.key]
    row += [config.get(name) for name in _PLACE]
    row += [result.get("status"), cause]
    row += [config["settings"].get(name) for name in SETTINGS]
    row += [result.get(name) for name in _FIGURES]
    row += [memory.get(name) for name in _MEMORY] + [times.get(name) for name in _TIMES]
    return [*row, json.dumps(result)]
