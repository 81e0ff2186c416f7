"""All figures of hardware and software profiles: unit, possible range and usual range of each.

The table is `keys.csv`. A file, flag or calibration with a figure outside the possible range raises an error.
A figure more than ten times outside the range of the packaged profiles adds a warning to the result.
`docs/reference/profile-keys.md` shows the table; tests compare it with the dataclasses and packaged profiles.
"""

import dataclasses
import difflib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import table_beside, typed_rows

_FAR = 10.0


class ProfileError(UsageError):
    """Unknown, unreadable or inconsistent hardware or software profile; the message names file and key."""


@dataclass(frozen=True)
class Key:
    """Row of one figure. `name`: the dotted key, without list positions and names that users choose.

    `least` to `most` is the possible range, `low` to `high` the range in packaged profiles.
    """

    name: str
    unit: str
    meaning: str
    least: float
    most: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"from {self.least:,g} to {self.most:,g} {self.unit}"


KEYS: Mapping[str, Key] = {row.name: row for row in typed_rows(__file__, "keys.csv", Key)}
_MORE = table_beside(__file__, "keys.toml")


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Raise `ProfileError` with the key, its value and the rule, unless `condition` holds."""
    if not condition:
        raise ProfileError(f"{key} = {value!r}: {rule}")


def check_figures(profile: object) -> None:
    """Raise `ProfileError` for the first figure of a profile outside its possible range."""
    for key, name, value in figures(profile):
        require(key.least <= value <= key.most, name, value, f"must be {key}")


def far_figures(profile: object) -> list[str]:
    """Return a message for each figure that is far outside the range of the packaged profiles."""
    return [
        f"{name} = {value:g} {key.unit} is far from every packaged profile ({key.low:,g} to {key.high:,g})"
        for key, name, value in figures(profile)
        if value * _FAR < key.low or value > key.high * _FAR
    ]


def figures(value: object, name: str = "", row: str = "") -> Iterator[tuple[Key, str, float]]:
    """Yield (row, dotted name, value) of all figures in (part of) a profile; of a list minimum and maximum.

    A class's `table` replaces the prefix `row`. Raises `ProfileError` for a figure without a row.
    """
    if dataclasses.is_dataclass(value):
        row = getattr(value, "table", row)
        for spec in dataclasses.fields(value):
            yield from figures(getattr(value, spec.name), _join(name, spec.name), _join(row, spec.name))
    elif isinstance(value, Mapping):
        for each, item in value.items():
            yield from figures(item, _join(name, each), _join(row, each))
    elif isinstance(value, tuple):
        if (columns := _MORE["columns"].get(row)) is not None:
            for column, values in zip(columns, zip(*value, strict=True), strict=True):
                yield from _extremes(values, f"{name}[{{}}].{column}", KEYS[f"{row}.{column}"])
        elif value and isinstance(value[0], float):
            yield from _extremes(value, f"{name}[{{}}]", KEYS[row])
        else:
            for index, item in enumerate(value):
                yield from figures(item, f"{name}[{index}]", row)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if row not in KEYS:
            near = difflib.get_close_matches(row, KEYS, n=1)
            raise ProfileError(f"unknown key {name}{f'; did you mean {near[0]}?' if near else ''}")
        yield KEYS[row], name, value


def _extremes(values: tuple[float, ...], name: str, key: Key) -> Iterator[tuple[Key, str, float]]:
    for value in {min(values), max(values)}:
        yield key, name.format(values.index(value)), value


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


@dataclass(frozen=True)
class Constant:
    """One figure of a profile's file, with the source of its key or of the nearest section above.

    In packaged files, `[sources]` or `estimated` must name every key or a section above it (a test checks).
    """

    key: str
    value: Any
    source: str | None
    estimated: bool


def constants(table: Mapping[str, Any]) -> list[Constant]:
    """Return the figures in one profile's file (`table`, as parsed from TOML), in the file's order.

    Library tables have one source each, which their section requires.
    """
    sources: Mapping[str, str] = table.get("sources", {})
    estimated: Sequence[str] = table.get("estimated", ())
    figures = {name: value for name, value in table.items() if name not in _MORE["not_figures"]}
    return [_constant(key, value, sources, estimated) for key, value in _leaves(figures, "")]


def _constant(key: str, value: Any, sources: Mapping[str, str], estimated: Sequence[str]) -> Constant:
    source, estimate = _nearest(key, sources), _nearest(key, estimated)
    # A section's source does not cover a key that is listed as an estimate.
    own = source is not None and (estimate is None or len(source) >= len(estimate))
    return Constant(key, value, sources[source] if source and own else None, estimate is not None)


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nearest(key: str, named: Container[str]) -> str | None:
    """Return `key` or the nearest section above it that has an entry."""
    while key and key not in named:
        key = key.rpartition(".")[0]
    return key or None
