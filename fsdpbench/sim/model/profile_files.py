"""Folders of profiles: packaged TOML files by name, and a user's files by path.

Error messages begin with the kind of profile and the file.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from fsdpbench.base.files.documents import is_there
from fsdpbench.base.reading import JsonObject, UnreadableError, parse_toml, printable, read_toml
from fsdpbench.sim.model import sections
from fsdpbench.sim.model.keys import ProfileError

P = TypeVar("P")


def _keys(table: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys in a file: top-level ones, and those inside tables as `nic.base_us`."""
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    return frozenset([*table, *(f"{name}.{key}" for name, value in tables.items() for key in value)])


@dataclass(frozen=True)
class ProfileFolder(Generic[P]):
    """Profiles of one kind. `kind`: its name in errors; `made`: the dataclass to build from a file."""

    kind: str
    folder: Path
    made: type[P]
    rebase: Callable[[JsonObject, JsonObject], None] = lambda below, above: None
    """Adjusts the table of a base profile to the file that extends it."""
    judge: Callable[[Any], None] = lambda profile: None
    """Raises `ProfileError` for a profile whose figures contradict each other."""

    def names(self) -> list[str]:
        """Return the sorted names of the packaged profiles."""
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def load(self, name_or_path: str | Path) -> P:
        """Load a profile by name or from the path of a TOML file.

        Raises `ProfileError` for an unknown name (and suggests the nearest) and for a file that cannot be
        read, is not TOML, lacks a key, has an unknown key, or has a value of a wrong type or out of range.
        """
        text = str(name_or_path)
        known = self.names()
        if text.lower() in known:
            return self._packaged(text.lower())
        path = Path(name_or_path)
        if path.suffix == ".toml" or is_there(path):
            try:
                return self._make(read_toml(path), text)
            except UnreadableError as error:
                raise ProfileError(f"{self.kind} profile {error}") from None
        begun = [name for name in known if name.startswith(text.lower())]
        near = begun or difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        raise ProfileError(f"unknown {self.kind} {text!r}: {hint} A path to a .toml file is taken too.")

    def layers(self, name_or_path: str | Path) -> list[tuple[str, frozenset[str]]]:
        """Return the name and own keys of each file, from the profile to its last base.

        If the first file cannot be read, return no layers.
        """
        text, known = str(name_or_path), self.names()
        packaged = text.lower() in known
        layers: list[tuple[str, frozenset[str]]] = []
        name = text.lower() if packaged else text
        try:
            table = self._table(name) if packaged else read_toml(Path(name_or_path))
        except (ProfileError, UnreadableError):
            return layers
        layers.append((name, _keys(table)))
        while (base := table.get("base")) in known:
            table = self._table(str(base))
            layers.append((str(base), _keys(table)))
        return layers

    # Cached: a process that forks reads packaged files once for its children.
    @functools.cache  # noqa: B019 - a folder lives as long as the process
    def _table(self, name: str) -> Mapping[str, Any]:
        try:
            return read_toml(self.folder / f"{name}.toml")
        except UnreadableError as error:
            raise ProfileError(f"{self.kind} profile {error}") from None

    @functools.cache  # noqa: B019
    def _packaged(self, name: str) -> P:
        return self._make(dict(self._table(name)), name)

    def parse(self, content: str | bytes, origin: str) -> P:
        """Parse a profile from TOML text; error messages begin with `origin` (a file name)."""
        try:
            table = parse_toml(content, origin)
        except UnreadableError as error:
            raise ProfileError(f"{self.kind} profile {error}") from None
        return self._make(table, origin)

    def _make(self, table: JsonObject, origin: str) -> P:
        try:
            profile = build(self.made, self._on_its_base(table), "")
            self.judge(profile)
        except ProfileError as error:
            raise ProfileError(f"{self.kind} profile {origin}: {error}") from None
        assert isinstance(profile, self.made)
        return profile

    def _on_its_base(self, table: JsonObject) -> JsonObject:
        """Complete the table from the packaged profile that `base = "NAME"` names."""
        base = table.pop("base", None)
        if base is None:
            return table
        known = self.names()
        if base not in known:
            raise ProfileError(f"base = {base!r} is not a packaged profile; known are {', '.join(known)}")
        below = self._on_its_base(dict(self._table(base)))
        self.rebase(below, table)
        return _merged(below, table)


def _merged(below: JsonObject, above: JsonObject) -> JsonObject:
    """Return `below` updated with `above`, nested tables included."""
    merged = dict(below)
    for key, value in above.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if nested else value
    return merged


_UNPLACED = (
    sections.LinkCurve,
    sections.AttentionTable,
    sections.FactorGrid,
    sections.LibraryTables,
    sections.ProductTable,
    sections.RankCurve,
)
_LARGEST = 1e18
"""Figures of machines are far smaller; beyond this, products of figures overflow."""
_LONGEST_TEXT, _LONGEST_LIST = 2000, 1000


def build(cls: type, table: Mapping[str, Any], prefix: str) -> object:
    """Build a dataclass from a TOML table, checking keys and types; `prefix`: its place in the file."""
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
        # Curves and library tables do not know their place in the file; other sections name themselves.
        raise ProfileError(f"{prefix}{error}" if cls in _UNPLACED else str(error)) from None


def _listed(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{key} = {value!r}: must be a list")
    if len(value) > _LONGEST_LIST:
        raise ProfileError(f"{key}: {len(value):,} entries; at most {_LONGEST_LIST:,} are possible")
    return value


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Check a TOML value against a field's type; turn lists into tuples and tables into dataclasses."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ProfileError(f"{key} = {value!r}: must be a table")
        return build(typing.cast(type, hint), value, key + ".")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # X | None: a value that is given is an X
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
        if not abs(value) <= _LARGEST:  # also refuses nan
            raise ProfileError(f"{key} = {value!r}: must be a finite number, up to {_LARGEST:g}")
        return float(value)
    if type(value) is hint:
        if isinstance(value, str) and (len(value) > _LONGEST_TEXT or printable(value) != value):
            raise ProfileError(f"{key}: must be one line of up to {_LONGEST_TEXT:,} printable characters")
        return value
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    raise ProfileError(f"{key} = {value!r}: must be {names.get(hint, hint)}")
