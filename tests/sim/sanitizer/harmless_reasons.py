"""Why mutants that are not reported harm nothing, as written down in `harmless/*.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent / "harmless"


def read_reasons(owner: str) -> dict[str, str]:
    """By a site's key. Raises ValueError for a site that has two reasons."""
    reasons: dict[str, str] = {}
    for entry in tomllib.loads((FOLDER / f"{owner}.toml").read_text(encoding="utf-8"))["harmless"]:
        for key in entry["sites"]:
            if key in reasons:
                raise ValueError(f"{owner}.toml has two reasons for {key}")
            reasons[key] = " ".join(entry["reason"].split())
    return reasons
