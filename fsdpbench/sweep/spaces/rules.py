"""Conditions of a space: lists that apply only to some points, and combinations that are left out.

    when     strategy=HYBRID_SHARD => shard_size=2,4     TOML: [[when]]     match = {...}  settings = {...}
    exclude  batch=32 activation_checkpointing=none      TOML: [[exclude]]  match = {...}

A match names settings, `system` or `gpus`, each with one value or several; a point matches if all of them do.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError
from fsdpbench.base.numbers import whole_number
from fsdpbench.base.settings import Value, read_list, setting_named, show_value

_PLACES = ("system", "gpus")
Match = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Rule:
    """Points that `match`: with `lists` those are swept too, without they are left out."""

    match: Match
    lists: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def holds(self, config: Config) -> bool:
        """Whether `config` matches. Its settings must not have been set to null yet."""
        return all(_actual(config, name) in values for name, values in self.match.items())

    def to_table(self) -> dict[str, dict[str, list[Value]]]:
        """The rule as TOML holds it."""
        table = {"match": _as_typed(self.match)}
        if self.lists:
            table["settings"] = _as_typed(self.lists)
        return table


def read_rule(table: object, where: str, *, adds: bool) -> Rule:
    """A rule from a TOML table. `adds`: it must have `settings`. Raises `UsageError` naming `where`."""
    keys = {"match", "settings"} if adds else {"match"}
    if not isinstance(table, Mapping) or set(table) != keys:
        shape = "match = {...} and settings = {...}" if adds else "match = {...}"
        raise UsageError(f"{where}: expected a table with {shape}, not {table!r}")
    for key in keys:
        if not isinstance(table[key], Mapping) or not table[key]:
            raise UsageError(f"{where}: {key} must name at least one setting")
    lists = {
        setting_named(name).name: tuple(read_list(name, v)) for name, v in table.get("settings", {}).items()
    }
    return Rule(_read_match(table["match"]), lists)


def parse_when(text: str) -> Rule:
    """`strategy=HYBRID_SHARD => shard_size=2,4`. Raises `UsageError`."""
    match, arrow, lists = text.partition("=>")
    if not arrow:
        raise UsageError(
            f"--when {text!r}: write it as `strategy=HYBRID_SHARD => shard_size=2,4` (quoted, for the shell)"
        )
    return read_rule({"match": _assignments(match), "settings": _assignments(lists)}, "--when", adds=True)


def parse_exclude(text: str) -> Rule:
    """`batch=32 activation_checkpointing=none`. Raises `UsageError`."""
    return read_rule({"match": _assignments(text)}, "--exclude", adds=False)


def _assignments(text: str) -> dict[str, str]:
    found = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r} in a condition: {error}") from None
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f"{word!r} in a condition: write name=value, or name=value,value")
        found[name.strip()] = value
    return found


def _read_match(given: Mapping[str, Any]) -> dict[str, tuple[Value, ...]]:
    match: dict[str, tuple[Value, ...]] = {}
    for name, values in given.items():
        if name in _PLACES:
            items = (
                values
                if isinstance(values, Sequence) and not isinstance(values, str)
                else str(values).split(",")
            )
            match[name] = tuple(_ranks(item) if name == "gpus" else str(item).strip() for item in items)
        else:
            match[setting_named(name).name] = tuple(read_list(name, values))
    return match


def _ranks(item: object) -> int:
    try:
        return whole_number(str(item), 1)
    except ValueError:
        raise UsageError(f"gpus={item} in a condition: expected a number of ranks") from None


def _actual(config: Config, name: str) -> Value:
    if name in _PLACES:
        value: Value = getattr(config, name)
        return value
    found: Value = getattr(config.settings, name)
    return found


def _as_typed(lists: Mapping[str, Sequence[Value]]) -> dict[str, list[Any]]:
    return {name: [show_value(v) if v is None else v for v in values] for name, values in lists.items()}
