"""Records of the analysis: integers in Python, plain values in JSON.

class Retry(Record, time="", calls="driver_calls"):      {"step": 3, "driver_calls": 2, "cost_s": 0.001}
    time: Ns                                             left out
    step: int
    calls: int                                           under another name
    cost: Ns                                             in seconds
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

Ns: TypeAlias = int
"""Nanoseconds. In JSON a field of this type is in seconds, and its name ends in `_s`."""

_IS_TIME = re.compile(r"\bNs\b")


def seconds(ns: int) -> float:
    """Return ns in seconds: the only place where a time becomes a float."""
    return ns / 1_000_000_000


class Record:
    """A dataclass that converts to its fields; class arguments rename fields, or drop them if empty."""

    _keys: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **keys: str) -> None:
        cls._keys = keys

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        found = {}
        for each in fields(self):  # type: ignore[arg-type]
            key = self._keys.get(each.name, each.name)
            if key:
                is_time = _IS_TIME.search(str(each.type)) is not None
                found[f"{key}_s" if is_time else key] = _plain(getattr(self, each.name), is_time)
        return found


def _plain(value: Any, is_time: bool) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(each, is_time) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each, is_time) for key, each in value.items()}
    if isinstance(value, Path):
        return str(value)
    return seconds(value) if is_time and value is not None else value
