"""Texts of errors in tables: each is used, with as many values as it has places."""

from __future__ import annotations

import ast
import string
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "fsdpbench.base.errors": "fsdpbench/base/errors.toml",
    "fsdpbench.sim.torch_device.strict.words": "fsdpbench/sim/torch_device/strict/errors.toml",
    "fsdpbench.workloads.shape": "workloads/errors.toml",
    "shared": "impl/shared/errors.toml",
}
"""The tables, by the modules that `error_text` is imported from."""
FOLDERS = ("fsdpbench", "impl", "workloads", "reports")
LINKS = tuple(ROOT / "fsdpbench" / name for name in FOLDERS)


def origin_of(path: Path, tree: ast.Module) -> str | None:
    """Return the module that a file has `error_text` from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "error_text" for alias in node.names):
            return node.module or "shared"  # `from . import error_text`
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return next((each for each in TABLES if each.endswith(name)), None)


@cache
def calls() -> dict[str | None, list[tuple[str, ast.Call]]]:
    """Return the place and the syntax of each call that reads a text, by its table."""
    found = defaultdict(list)
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if any(link in path.parents for link in LINKS):
            continue
        text = path.read_text(encoding="utf-8")
        if "error_text" not in text:
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "error_text":
                found[origin_of(path, tree)].append((f"{path.relative_to(ROOT)}:{node.lineno}", node))
    return found


@pytest.mark.parametrize("table", TABLES)
def test_texts_have_as_many_places_as_values(table: str) -> None:
    texts = tomllib.loads((ROOT / TABLES[table]).read_text(encoding="utf-8"))
    wrong, used = [], set()
    for place, call in calls()[table]:
        name = ast.literal_eval(call.args[0])
        places = [field for _, field, _, _ in string.Formatter().parse(texts[name]) if field is not None]
        used.add(name)
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        if not starred and len(places) != len(call.args) - 1:
            wrong.append(f"{place}: {len(call.args) - 1} values for {len(places)} places of {name}")
    assert not wrong, "\n".join(wrong)
    assert used == texts.keys()
