"""Writes a file that is committed: whole or not at all."""

from __future__ import annotations

from pathlib import Path

from fsdpbench.errors import BenchError
from fsdpbench.files.whole_files import write_whole


def replace_file(path: Path, text: str) -> None:
    """Put `text` instead of what is at `path`. Raises `BenchError`."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None
