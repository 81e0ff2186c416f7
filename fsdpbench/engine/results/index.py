"""`results.sqlite`

The record's figures in one table, for queries. Made from the folders, thrown away at will.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdpbench.base.errors import BenchError
from fsdpbench.base.files.documents import to_json
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.reading import JsonObject, one_line
from fsdpbench.base.settings import SETTINGS
from fsdpbench.engine.results.store import INDEX_FILE, Store, StoredPoint
from fsdpbench.reports.figures import flat

_PLACE = ("model", "system", "device", "hardware", "gpus", "gpus_per_node")


def build_index(path: Path, points: Iterable[StoredPoint]) -> None:
    """Write the index of `points` to `path`, whole or not at all. Raises `OSError`, `sqlite3.Error`."""
    columns = ["folder", "name", "key", *_PLACE, "status", "cause", *SETTINGS]
    columns += [figure.in_index for figure in flat()] + ["result"]
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        quoted = ", ".join(f'"{column}"' for column in columns)
        connection.execute(f"CREATE TABLE results ({quoted})")
        marks = ", ".join("?" * len(columns))
        rows = ([_cell(value) for value in _row(point)] for point in points)
        connection.executemany(f"INSERT INTO results VALUES ({marks})", rows)
        connection.commit()
        content = connection.serialize()
    write_whole(path, content)


def refresh_index(store: Store) -> None:
    """Write the index of all in `store`, or print why it cannot be made: the folders are the record."""
    path = store.folder / INDEX_FILE
    try:
        build_index(path, store.points())
    except (OSError, sqlite3.Error, BenchError) as error:
        if store.folder.is_dir():
            reason = getattr(error, "strerror", None) or error
            problem = f"{path}: cannot be written ({reason}); the results are in the folders beside it, and"
            print(f"{one_line(problem)} `fsdpbench report` makes it again", file=sys.stderr)


def _row(point: StoredPoint) -> list[Any]:
    config, result = point.config, point.result
    row: list[Any] = [point.folder.name, config.get("name"), point.key]
    row += [config.get(name) for name in _PLACE]
    row += [result.status.value, result.message]
    row += [_object(config, "settings").get(name) for name in SETTINGS]
    row += [result.stored(figure.path) for figure in flat()]
    return [*row, to_json(result.to_dict())]


def _object(content: Mapping[str, Any], name: str) -> JsonObject:
    """Return the object under `name`; empty if that is not one."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _cell(value: Any) -> Any:
    """Return `value` as a database takes it: integers beyond 64 bits, lists and objects as text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict | list) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        return json.dumps(value)
    return value
