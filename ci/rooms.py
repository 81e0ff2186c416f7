"""Writes the README of every room: what it is, its picture, what it may import, and what its files are.

    python ci/rooms.py            writes them; those of `impl` are written by hand

All of it comes from the sources: the docstrings of the package and of its files, and the layers of imports in
`pyproject.toml`. `tests/docs/test_rooms.py` looks whether they are up to date.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HEAD = "<!-- Made by ci/rooms.py of the docstrings. -->\n"
_ALONE = {
    "reports": "May import: numpy, pandas, plotly, jinja2, ... and `settings`; no torch, no other room.",
    "workloads": "May import: torch, when a model is built; nothing of the bench.",
}


def rooms() -> list[Path]:
    """The folders that have such a page."""
    inside = sorted(path.parent for path in (ROOT / "fsdpbench").glob("*/__init__.py"))
    own = [path for path in inside if not path.is_symlink()]
    return [ROOT / "fsdpbench", *own, ROOT / "reports", ROOT / "workloads"]


def page_of(room: Path) -> str:
    """The text of a room's README."""
    parts = [_HEAD, f"# `{room.relative_to(ROOT)}`\n", docstring(room / "__init__.py"), may_import(room)]
    packages = sorted(path.parent for path in room.glob("*/__init__.py") if not path.parent.is_symlink())
    files = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
    folders = [f"| [`{path.name}/`]({path.name}) | {sentence(path / '__init__.py')} |" for path in packages]
    modules = [f"| [`{path.name}`]({path.name}) | {sentence(path)} |" for path in files]
    for head, rows in (("room", folders), ("file", modules)):
        if rows:
            parts.append("\n".join([f"\n| {head} | what it is |", "|---|---|", *rows]))
    return "\n".join(parts) + "\n"


def may_import(room: Path) -> str:
    """The layers below this one, as the import contract has them."""
    if room.name in _ALONE:
        return _ALONE[room.name]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["name"] == "the bench")
    if room.name == "fsdpbench":
        return f"Who imports whom, from the top down: {_shown(layers)}."
    own = next(layer for layer in layers if room.name in layer.split(" | "))
    return f"May import, from the top down: {_shown(layers[layers.index(own) + 1 :])}."


def _shown(layers: list[str]) -> str:
    return " › ".join(" · ".join(f"`{each}`" for each in layer.split(" | ")) for layer in layers)


def docstring(path: Path) -> str:
    """A module's docstring as it is written, so that what is indented is code."""
    text = (ast.get_docstring(ast.parse(path.read_text()), clean=False) or "").strip()
    return re.sub(r"(?ms)^(=+ +=+\n.*^=+ +=+)$", r"```\n\1\n```", text) + "\n"


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    first = " ".join(docstring(path).split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", first)[0].rstrip(".:").replace("|", "\\|")


if __name__ == "__main__":
    for each in rooms():
        (each / "README.md").write_text(page_of(each))
