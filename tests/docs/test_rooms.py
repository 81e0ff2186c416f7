"""Every room has a page of a screen, and what it says is true."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("rooms", ROOT / "ci" / "rooms.py")
assert SPEC is not None
assert SPEC.loader is not None
ROOMS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ROOMS)
SCREEN = 60


@pytest.mark.parametrize("room", ROOMS.rooms(), ids=lambda room: str(room.relative_to(ROOT)))
def test_the_page_of_a_room_is_of_its_files(room: Path) -> None:
    page = (room / "README.md").read_text()
    assert page == ROOMS.page_of(room), "write it again: python ci/rooms.py"
    assert len(page.splitlines()) <= SCREEN
    assert "|  |" not in page, "a file without a docstring"


def test_the_map_leads_to_files_in_two_steps() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page[page.index("## Where is what") : page.index("## How to add")]
    rows = [row for row in table.splitlines() if re.match(r"\| (Where|When|Which|What|How)", row)]
    assert len(rows) >= 30
    for row in rows:
        links = re.findall(r"\]\(([^)#]+)\)", row)
        assert links, row
        assert all((ROOT / link).exists() for link in links), row
        named = [name for name in re.findall(r"`([\w/]+\.py)`", row) if not (ROOT / name).exists()]
        folders = [(ROOT / link) if (ROOT / link).is_dir() else (ROOT / link).parent for link in links]
        assert all(any((folder / name).exists() for folder in folders) for name in named), row


def test_what_the_map_names_is_in_the_files_that_it_leads_to() -> None:
    """The second step: `Runtime.post_backward` and the like are found by searching the linked files."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    found = 0
    table = page[page.index("## Where is what") : page.index("## How to add")]
    for row in re.findall(r"^\| [WH].*", table, re.MULTILINE):
        links = [ROOT / link for link in re.findall(r"\]\(([^)#]+)\)", row)]
        links = [link.parent if link.name == "README.md" else link for link in links]
        files = [file for link in links for file in ([link] if link.is_file() else link.rglob("*.py"))]
        answer = re.sub(r"\[[^\]]*\]", "", row.rpartition("? |")[2])
        named = [name for name in re.findall(r"`([\w.]+)`", answer) if not name.endswith((".py", ".csv"))]
        text = "".join(file.read_text() for file in files) if named else ""
        assert [name for name in named if name.rpartition(".")[2] not in text] == [], row
        found += len(named)
    assert found >= 8
