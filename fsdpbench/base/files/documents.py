"""JSON and TOML documents: read with limits, and flat TOML written.

A document that cannot be read is a usage error of one line. `fsdpbench.base.reading` does
the work. Code that reads files which may be broken without a mistake (a result cut short, another
machine's lock) catches `UnreadableFileError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsdpbench.base import reading
from fsdpbench.base.errors import UsageError

LARGEST_INTEGER = reading.LARGEST_INTEGER
T = TypeVar("T")


class UnreadableFileError(UsageError):
    """A file that is missing, no file, too large or of another kind; the message names it and the reason."""


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder at `path`; none is at a path that no file system can hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; NaN and infinity pass. Raise `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_json(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise `UnreadableFileError` also for any other value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableFileError(f"{path}: holds no JSON object")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables in a TOML file; NaN and infinity pass. Raise `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_toml(path))


def read_text(path: Path) -> str:
    """Return the text in a file. Raise `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_text(path, reading.LARGEST_JSON))


def parse_json(content: bytes | str, origin: str) -> Any:
    """Return the value of a JSON text; `origin` begins the message of an `UnreadableFileError`."""
    return _as_usage(lambda: reading.parse_json(content, origin))


def parse_toml(content: bytes | str, origin: str) -> dict[str, Any]:
    """Return the tables of a TOML text; `origin` begins the message of an `UnreadableFileError`."""
    return _as_usage(lambda: reading.parse_toml(content, origin))


def _as_usage(read: Callable[[], T]) -> T:
    try:
        return read()
    except reading.UnreadableError as error:
        raise UnreadableFileError(str(error)) from None


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
