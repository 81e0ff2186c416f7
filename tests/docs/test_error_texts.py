"""Texts of errors in tables: each is used, with as many values as it has places."""

from __future__ import annotations

import ast
import string
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "impl": "impl/shared/errors.toml",
    "workloads": "workloads/errors.toml",
    "fsdpbench/lab/calibrate": "fsdpbench/lab/calibrate/errors.toml",
    "fsdpbench/sim": "fsdpbench/sim/torch_device/strict/errors.toml",
}


def calls(package: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the place and the syntax of each call that reads a text."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "error_text"
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.parametrize("package", TABLES)
def test_texts_have_as_many_places_as_values(package: str) -> None:
    texts = tomllib.loads((ROOT / TABLES[package]).read_text(encoding="utf-8"))
    wrong, used = [], set()
    for place, call in calls(package):
        name = ast.literal_eval(call.args[0])
        places = [field for _, field, _, _ in string.Formatter().parse(texts[name]) if field is not None]
        used.add(name)
        if len(places) != len(call.args) - 1:
            wrong.append(f"{place}: {len(call.args) - 1} values for {len(places)} places of {name}")
    assert not wrong, "\n".join(wrong)
    assert used == texts.keys()
