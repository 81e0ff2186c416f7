"""Every figure of a hardware or software profile: its unit, what is physically possible, what is usual.

The table is `keys.csv`. A figure outside its range is refused wherever it comes from: a file, a flag, a
calibration. One that is more than ten times as far out as any packaged profile is a warning in the result.
`docs/reference/profile-keys.md` shows the table; tests compare it with the dataclasses and with the packaged
profiles.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.errors import UsageError

_FAR = 10.0


class ProfileError(UsageError):
    """A hardware or software profile that is unknown, unreadable or inconsistent; the message names file and
    key."""


@dataclass(frozen=True)
class Key:
    """A figure: ``name`` is the dotted key, without the names that a user chooses and positions in lists.

    ``least`` to ``most`` is possible, ``low`` to ``high`` is what packaged profiles have.
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

    def is_far(self, value: float) -> bool:
        """Whether no packaged profile has a figure near it."""
        return value * _FAR < self.low or value > self.high * _FAR


def _key(row: Mapping[str, str]) -> Key:
    least, most, low, high = (float(row[bound]) for bound in ("least", "most", "low", "high"))
    return Key(row["key"], row["unit"], row["meaning"], least, most, low, high)


with Path(__file__).with_name("keys.csv").open(encoding="utf-8", newline="") as _file:
    KEYS: Mapping[str, Key] = {row["key"]: _key(row) for row in csv.DictReader(_file)}
_COLUMNS = {
    "gemm.tiles": ("rows", "columns", "efficiency"),
    "libraries.products.tiles": ("rows", "columns", "efficiency"),
    "nvlink.points": ("bytes", "gb_s"),
    "libraries.collectives.points": ("bytes", "us"),
}
"""Lists of lists that have a key for each position."""


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Raise `ProfileError` that names a key and its value unless it keeps the rule."""
    if not condition:
        raise ProfileError(f"{key} = {value!r}: {rule}")


def check_figures(profile: object) -> None:
    """Raise `ProfileError` for the first figure of a profile that is not possible."""
    for key, name, value in figures(profile):
        require(key.least <= value <= key.most, name, value, f"must be {key}")


def far_figures(profile: object) -> list[str]:
    """The figures that are far from those of every packaged profile, one sentence each."""
    return [
        f"{name} = {value:g} {key.unit} is far from every packaged profile ({key.low:,g} to {key.high:,g})"
        for key, name, value in figures(profile)
        if key.is_far(value)
    ]


def figures(value: object, name: str = "", row: str = "") -> Iterator[tuple[Key, str, float]]:
    """Every figure in a profile or a part of it: its row, its own dotted name, its value; the least and the
    greatest of a list.

    A class whose figures stand elsewhere in the table says where (``table``). Raises `ProfileError` for a
    figure without a row.
    """
    if dataclasses.is_dataclass(value):
        row = getattr(value, "table", row)
        for spec in dataclasses.fields(value):
            yield from figures(getattr(value, spec.name), _join(name, spec.name), _join(row, spec.name))
    elif isinstance(value, Mapping):
        for each, item in value.items():
            yield from figures(item, _join(name, each), _join(row, each))
    elif isinstance(value, tuple):
        if (columns := _COLUMNS.get(row)) is not None:
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
