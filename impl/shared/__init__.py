"""Settings, layouts, placements, private names of torch and error messages, for both front ends."""

import tomllib
from pathlib import Path

_TEXTS: dict[str, str] = tomllib.loads((Path(__file__).parent / "errors.toml").read_text(encoding="utf-8"))


def error_text(name: str, *values: object) -> str:
    """Return the error message ``name`` of `errors.toml`, formatted with `values`."""
    return _TEXTS[name].format(*values)
