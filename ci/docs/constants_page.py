"""The sections of the page of constants, from the profiles' own files."""

from __future__ import annotations

import tomllib
from typing import Any

import repository

from fsdpbench.sim.model.keys import Constant, constants

_FOLDERS = {"Hardware": "fsdpbench/sim/profiles", "Software": "fsdpbench/sim/profiles/software"}
_LONGEST = 60


def constants_sections() -> str:
    """Markdown: for each profile what its file gives itself, where that comes from, what is an estimate."""
    return "\n".join(
        _section(kind, tomllib.loads(path.read_text()))
        for kind, folder in _FOLDERS.items()
        for path in sorted((repository.ROOT / folder).glob("*.toml"))
    )


def _section(kind: str, table: dict[str, Any]) -> str:
    found = constants(table)
    base = f" Everything else is as in `{table['base']}`." if "base" in table else ""
    estimates = sum(constant.estimated for constant in found)
    lines = [
        f"\n## {kind}: {table['name']}\n",
        f"{table['title']}. {len(found)} figures in the file, {estimates} of them estimates.{base}\n",
        "| key | value | | source |",
        "|---|---|---|---|",
        *map(_row, found),
    ]
    return "\n".join([*lines, ""])


def _row(constant: Constant) -> str:
    value = str(constant.value)
    shown = value if len(value) <= _LONGEST else f"{len(constant.value)} entries"
    kind = "**estimate**" if constant.estimated else ""
    return f"| `{constant.key}` | {shown} | {kind} | {constant.source or ''} |"
