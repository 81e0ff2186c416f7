"""`--shape` as text."""

from __future__ import annotations

import contextlib

from fsdpbench.configuration.config import ShapeValue
from fsdpbench.errors import UsageError
from fsdpbench.numbers import finite_number, whole_number


def parse_shape(text: str | None) -> dict[str, ShapeValue]:
    """`layers=32,tied=true` as typed values. Raises `UsageError` on what is not a `name=value`."""
    shape: dict[str, ShapeValue] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise UsageError(f"--shape: {part!r} is not name=value, as in layers=32,d_model=4096")
        shape[name.strip()] = _typed(value.strip())
    return shape


def _typed(text: str) -> ShapeValue:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for read in (whole_number, finite_number):
        with contextlib.suppress(ValueError):
            return read(text)
    return text
