"""The two files of a configuration's folder, read without trusting them: `config.json` and `result.json`.

Only the fields of `config.json` that the page shows are typed. A file that is missing, cut off or of the
wrong types raises `FolderContentError` in one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from fsdpbench.base.reading import LARGEST_JSON, UnreadableError, all_on_one_line, one_line, read_bytes
from fsdpbench.reports.result import JsonObject, Result


class FolderContentError(Exception):
    """One configuration's folder cannot be read; the message is one line for people."""


class ConfigFile(msgspec.Struct, frozen=True):
    """`config.json`: what was asked for."""

    settings: JsonObject
    name: str = ""
    key: str = ""
    model: str = ""
    shape: JsonObject | None = None
    parameters: int | None = None
    system: str = ""
    device: str = ""
    hardware: JsonObject | str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpus_used_per_node: int | None = None
    software: str | None = None
    command: str | list[str] | None = None


FileT = TypeVar("FileT", ConfigFile, Result)


def read_file(path: Path, kind: type[FileT]) -> tuple[FileT, JsonObject]:
    """Return one of the two files as its type, and all that is in it.

    Raises:
        FolderContentError: the file is missing, unreadable, cut off, not JSON, or a field is of a wrong type.
    """
    try:
        content = read_bytes(path, LARGEST_JSON)
    except UnreadableError as error:
        if not path.exists():
            raise FolderContentError(f"{path.name} is missing") from None
        raise FolderContentError(f"{path.name} {error.reason}") from None
    try:
        # Whoever shows what is in it, on a terminal, in Markdown or on a page, shows it as it is read here.
        decoded = all_on_one_line(msgspec.json.decode(content))
        if kind is Result:
            return Result.of(decoded), decoded  # type: ignore[return-value]
        return msgspec.convert(decoded, kind), decoded
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FolderContentError(f"{path.name} ({len(content)} bytes): {one_line(error)}") from None
    except RecursionError:
        raise FolderContentError(f"{path.name}: nested too deeply") from None
