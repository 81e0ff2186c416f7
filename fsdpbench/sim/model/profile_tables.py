"""From a TOML table to a tree of frozen dataclasses, with errors that name the key."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from fsdpbench.reports.reading import printable
from fsdpbench.sim.model.keys import ProfileError
from fsdpbench.sim.model.library_sections import (
    AttentionTable,
    FactorGrid,
    LibraryTables,
    ProductTable,
    RankCurve,
)
from fsdpbench.sim.model.sections import LinkCurve

_UNPLACED = (LinkCurve, AttentionTable, FactorGrid, LibraryTables, ProductTable, RankCurve)
_LARGEST = 1e18
"""No figure of a machine comes near it; beyond, products of figures overflow."""
_LONGEST_TEXT, _LONGEST_LIST = 2000, 1000


def build(cls: type, table: Mapping[str, Any], prefix: str) -> object:
    """Make a dataclass from a TOML table, checking keys and types; ``prefix`` is its place in the file."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(fields)}"
            raise ProfileError(f"unknown key {prefix}{key}{hint}")
    values = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ProfileError(f"lacks the key {prefix}{name}")
    try:
        return cls(**values)
    except ProfileError as error:
        # Curves and library tables do not know where they stand; sections name themselves.
        raise ProfileError(f"{prefix}{error}" if cls in _UNPLACED else str(error)) from None


def _listed(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{key} = {value!r}: must be a list")
    if len(value) > _LONGEST_LIST:
        raise ProfileError(f"{key}: {len(value):,} entries; at most {_LONGEST_LIST:,} are possible")
    return value


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Check one TOML value against a field's type and turn lists into tuples, tables into dataclasses."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ProfileError(f"{key} = {value!r}: must be a table")
        return build(typing.cast(type, hint), value, key + ".")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # X | None: what is there is an X
        return _convert(arguments[0], value, key)
    if origin is tuple:
        inner = arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else float
        return tuple(_convert(inner, item, f"{key}[{at}]") for at, item in enumerate(_listed(value, key)))
    if origin is not None:  # Mapping[str, X]
        if not isinstance(value, Mapping):
            raise ProfileError(f"{key} = {value!r}: must be a table")
        return types.MappingProxyType(
            {name: _convert(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
        )
    if hint is float and type(value) in (int, float):
        if not abs(value) <= _LARGEST:  # nan too
            raise ProfileError(f"{key} = {value!r}: must be a finite number, up to {_LARGEST:g}")
        return float(value)
    if type(value) is hint:
        if isinstance(value, str) and (len(value) > _LONGEST_TEXT or printable(value) != value):
            raise ProfileError(f"{key}: must be one line of up to {_LONGEST_TEXT:,} printable characters")
        return value
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    raise ProfileError(f"{key} = {value!r}: must be {names.get(hint, hint)}")
