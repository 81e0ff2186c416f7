"""The one reader of JSON and the one of TOML; whatever cannot be read is a usage error of one line.

The work is in `reports.reading`, which needs nothing of the bench. Who reads files that may be broken without
anybody's fault (a result cut short, another machine's lock) catches `UnreadableFileError`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsdpbench.errors import UsageError
from fsdpbench.reports import reading

LARGEST_INTEGER = reading.LARGEST_INTEGER
T = TypeVar("T")


class UnreadableFileError(UsageError):
    """A file is missing, no file, too large, or not what it should be; the message names it and why."""


def is_there(path: Path) -> bool:
    """Whether something is at `path`; nothing does at one that no file system can hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_json(path: Path) -> Any:
    """The value in a JSON file; NaN and infinity pass. Raises `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_json(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """`read_json` where it must be an object. Raises `UnreadableFileError`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UnreadableFileError(f"{path}: holds no JSON object")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """The tables in a TOML file; NaN and infinity pass. Raises `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_toml(path))


def read_text(path: Path) -> str:
    """The text in a file. Raises `UnreadableFileError`."""
    return _as_usage(lambda: reading.read_text(path, reading.LARGEST_JSON))


def parse_json(content: bytes | str, origin: str) -> Any:
    """`read_json` for what is read already; `origin` begins the message."""
    return _as_usage(lambda: reading.parse_json(content, origin))


def parse_toml(content: bytes | str, origin: str) -> dict[str, Any]:
    """`read_toml` for what is read already; `origin` begins the message."""
    return _as_usage(lambda: reading.parse_toml(content, origin))


def _as_usage(read: Callable[[], T]) -> T:
    try:
        return read()
    except reading.UnreadableError as error:
        raise UnreadableFileError(str(error)) from None
