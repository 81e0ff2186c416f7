"""Writes the README of every room: what it is, its picture, what it may import, and what its files are.

    python ci/rooms.py            writes them; those of `impl` are written by hand

All of it comes from the sources: the docstrings of the package and of its files, and the layers of imports in
`pyproject.toml`. `tests/docs/test_rooms.py` looks whether what they say is true.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HEAD = "<!-- Made by ci/rooms.py of the docstrings. -->\n"
_REPORTS = ["numpy, pandas, plotly, jinja2; no torch"]
_WORKLOADS = ["torch; nothing of the bench"]


def rooms() -> list[Path]:
    """The folders that have such a page."""
    inside = sorted(
        path for path in (ROOT / "fsdpbench").iterdir() if path.is_dir() and not path.is_symlink()
    )
    found = [ROOT / "fsdpbench", *inside, ROOT / "reports", ROOT / "workloads"]
    return [path for path in found if (path / "__init__.py").exists()]


def page_of(room: Path) -> str:
    """The text of a room's README."""
    name = room.relative_to(ROOT)
    imports = ", ".join(may_import(room)) or "nothing of the bench"
    parts = [_HEAD, f"# `{name}`\n", docstring(room / "__init__.py") + "\n", f"May import: {imports}.\n"]
    folders = [
        f"| [`{path.name}/`]({path.name}) | {sentence(path / '__init__.py')} |"
        for path in sorted(room.iterdir())
        if path.is_dir() and not path.is_symlink() and (path / "__init__.py").exists()
    ]
    files = [
        f"| [`{path.name}`]({path.name}) | {sentence(path)} |"
        for path in sorted(room.glob("*.py"))
        if path.name != "__init__.py"
    ]
    for head, rows in (("room", folders), ("file", files)):
        if rows:
            parts.append("\n".join([f"| {head} | what it is |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def may_import(room: Path) -> list[str]:
    """Rooms of the layers below this one, as the import contract has them."""
    if room.name in ("reports", "workloads"):
        return {"reports": _REPORTS, "workloads": _WORKLOADS}[room.name]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["name"] == "the bench")
    if room.name == "fsdpbench":
        return ["from the top down: " + " › ".join(layer.replace(" | ", " · ") for layer in layers)]
    below = [layer for layer in layers if room.name in layer.split(" | ")][0]
    return [f"`{each}`" for layer in layers[layers.index(below) + 1 :] for each in layer.split(" | ")]


def docstring(path: Path) -> str:
    """A module's docstring; tables of reStructuredText as code."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.sub(r"(?ms)^(=+ +=+\n.*^=+ +=+)$", r"```\n\1\n```", text)


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    first = " ".join(docstring(path).split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", first)[0].rstrip(".:").replace("|", "\\|")


if __name__ == "__main__":
    for each in rooms():
        (each / "README.md").write_text(page_of(each))
