"""Writes flat TOML (the standard library reads TOML and does not write it)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence


def to_toml(tables: Mapping[str, object]) -> str:
    """`tables` as TOML: plain values and lists first, then one table a mapping. `None` values are left out.

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
