"""Writes a file that is committed: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from fsdpbench.errors import BenchError


def replace_file(path: Path, text: str) -> None:
    """Put `text` in place of what is at `path`. Raises `BenchError`."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None
