"""How the wish to compile reaches the fork server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpbench.cli.requests.options import asks_to_compile


@pytest.mark.parametrize(
    ("flags", "assignments", "expected"),
    [
        ({}, (), False),
        ({"compile": "false"}, (), False),
        ({"compile": "false,true"}, (), True),
        ({}, ("compile=on",), True),
        ({}, ("compile = false, yes",), True),
        ({}, ("seq=1",), False),
    ],
)
def test_a_quick_look_for_compile(flags: Any, assignments: Any, expected: bool) -> None:
    assert asks_to_compile(flags, assignments) is expected


def test_a_quick_look_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text('model = "gpt-tiny"\n[settings]\ncompile = [false, true]\n')
    assert asks_to_compile({}, (), str(path))
