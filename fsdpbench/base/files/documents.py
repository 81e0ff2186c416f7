"""JSON objects read, and flat TOML written; `fsdpbench.base.reading` has the rest of reading."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdpbench.base.reading import UnreadableError, read_json
from fsdpbench.base.reading import read_text as read_text


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder at `path`; none is at a path that no file system can hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise `UnreadableError` also for any other value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableError(path, "holds no JSON object")
    return content


def to_toml(tables: Mapping[str, object]) -> str:
    """Return `tables` as TOML: plain values and lists first, then one table a mapping. `None` is left out.

    Raises `TypeError` for a value that TOML has no form for.
    """
    lines = _lines({key: value for key, value in tables.items() if not isinstance(value, Mapping)})
    for key, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_name(key)}]", *_lines(table)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _lines(table: Mapping[str, object]) -> list[str]:
    return [f"{_name(name)} = {_value(value)}" for name, value in table.items() if value is not None]


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_name(name)} = {_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML has no form for {value!r}")
