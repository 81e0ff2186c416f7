"""Settings, layouts, placements, private names of torch and texts of errors, for both FSDPs."""

import tomllib
from pathlib import Path

_TEXTS: dict[str, str] = tomllib.loads((Path(__file__).parent / "errors.toml").read_text(encoding="utf-8"))


def error_text(name: str, *values: object) -> str:
    """Return the text of an error by its name in `errors.toml`, with `values` in their places."""
    return _TEXTS[name].format(*values)
