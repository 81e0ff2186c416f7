"""Read JSON objects and the package's tables, write JSON and flat TOML; `base.reading` reads user files."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import msgspec

from fsdpbench.base.reading import JsonObject, UnreadableError, printable, read_json, read_rows
from fsdpbench.base.reading import read_text as read_text

T = TypeVar("T")
_WORDS = re.compile(r"(?:tuple|frozenset)\[")
_ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(u[dD][89a-fA-F]..)|\\.")
"""Matches one escape of a JSON text; the group is half a surrogate pair without its other half."""


def is_there(path: Path) -> bool:
    """Return whether `path` exists; False for a path that no file system can hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_json_object(path: Path) -> JsonObject:
    """Return the object in a JSON file. Raise `UnreadableError` also for any other value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableError(path, "holds no JSON object")
    return content


def to_json(content: object, indent: int | None = None, **options: bool) -> str:
    """Return `content` as JSON that every parser accepts, with `options` of `json.dumps`. Half a surrogate
    pair (a byte of a path that is not UTF-8) is written as the text of its escape."""
    text = json.dumps(content, indent=indent, **options)  # type: ignore[arg-type]
    if "\\ud" not in text:
        return text
    return _ESCAPES.sub(lambda escape: f"\\\\{escape[1]}" if escape[1] else escape[0], text)


def converted(content: object, kind: type[T]) -> T:
    """Return parsed `content` as a `kind`. Raises `msgspec.ValidationError`, which names the field, also for
    half a surrogate pair instead of a number, for which `msgspec.convert` raises another error."""
    try:
        return msgspec.convert(content, kind)
    except UnicodeEncodeError as error:
        raise msgspec.ValidationError(f"{error.object!a} is not UTF-8") from None


def table_beside(module: str, name: str) -> JsonObject:
    """Return the tables of the TOML file `name` of the package, beside the source file `module`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def texts_beside(module: str, name: str) -> Callable[..., str]:
    """Return a function (name, *values) that formats a text, by name, of the TOML file beside `module`."""
    texts = table_beside(module, name)
    return lambda text, *values: str(texts[text].format(*values))


def rendered_beside(module: str, name: str, **values: object) -> str:
    """Return the jinja template `name` beside the source file `module`, rendered with `values` for a
    terminal: each value is escaped to one printable line."""
    import jinja2  # takes long to import

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=printable
    )
    return environment.from_string(Path(module).with_name(name).read_text("utf-8")).render(values)


def rows_beside(module: str, name: str) -> list[dict[str, str]]:
    """Return the rows of the CSV file `name` of the package, beside the source file `module`, by column;
    lines that begin with `#` are comments."""
    return read_rows(Path(module).with_name(name))


def typed_rows(module: str, name: str, kind: type[T]) -> tuple[T, ...]:
    """Return the rows of `rows_beside` as dataclasses of `kind`: an empty cell is the field's default, a cell
    of a tuple or set is split into words. Raises `msgspec.ValidationError` for a cell of another type."""
    lists = {each.name for each in fields(kind) if _WORDS.match(str(each.type))}  # type: ignore[arg-type]
    rows = (
        {column: cell.split() if column in lists else cell for column, cell in row.items() if cell}
        for row in rows_beside(module, name)
    )
    return tuple(msgspec.convert(row, kind, strict=False) for row in rows)


def to_toml(tables: Mapping[str, object]) -> str:
    """Return `tables` as TOML: first plain values and lists, then a table per mapping. `None` is omitted.

    Raises `TypeError` for a value that TOML cannot represent.
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
        text = value.encode("utf-8", "backslashreplace").decode()
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_name(name)} = {_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML has no form for {value!r}")
