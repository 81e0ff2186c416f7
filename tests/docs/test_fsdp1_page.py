"""Every test that the page on FSDP1's features names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "impl"


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))


def test_named_tests_exist() -> None:
    page = (ROOT / "docs" / "impl-fsdp1.md").read_text()
    named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_[\w*]+)?`", page)
    named = [(file, name) for file, name in named if file or name]
    assert len(named) > 40
    everywhere = set().union(*map(names_in, TESTS.glob("test_*.py")))
    for file, name in named:
        assert not file or (TESTS / file).is_file(), file
        if name:
            there = names_in(TESTS / file) if file else everywhere
            pattern = name.replace("*", r"\w*")
            assert any(re.fullmatch(pattern, each) for each in there), (file, name)
