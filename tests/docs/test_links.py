"""Pages lead somewhere: every relative link, and every file that a page names by its folder."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
)
_FOLDERS = ("fsdpbench", "impl", "workloads", "reports", "tests", "ci", "docs")
_ROOMS = sorted(
    path.name for path in (ROOT / "fsdpbench").iterdir() if path.is_dir() and not path.is_symlink()
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_anchors_of_links_are_headings() -> None:
    links = [
        (page, place, anchor)
        for page in PAGES
        for place, anchor in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", page.read_text())
        if place == "" or ("://" not in place and place.endswith(".md"))
    ]
    assert len(links) > 10
    wrong = [
        f"{page.name}: {place}#{anchor}"
        for page, place, anchor in links
        if anchor not in _headings((page.parent / place if place else page).read_text())
    ]
    assert wrong == []


def _headings(text: str) -> set[str]:
    """The anchors that the site builder makes of a page's headings."""
    lines = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    bare = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", line)).strip().lower() for line in lines]
    return {re.sub(r"[-\s]+", "-", line) for line in bare}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    if "measured" in page.parts or page.name == "CHANGELOG.md":
        return  # what was: names of then
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    missing = [name for name in named if name.split("/")[0] in (*_FOLDERS, *_ROOMS) and not _exists(name)]
    assert missing == []


def _exists(name: str) -> bool:
    return any((base / name).exists() for base in (ROOT, ROOT / "fsdpbench", ROOT / "impl"))


def test_the_map_answers_with_files() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| W")]
    assert len(rows) >= 12
    for row in rows:
        assert re.search(r"\]\([\w./]+\)|README", row), row
    assert "CONTRIBUTING.md" in (ROOT / "README.md").read_text()


def test_no_page_names_a_module_by_its_old_place() -> None:
    listed = subprocess.run(
        ["git", "grep", "-nE", r"\bfrom (impl|workloads|reports)\b"], cwd=ROOT, capture_output=True, text=True
    )
    allowed = ("tests/bench/namespace", "tests/docs/test_links.py", "CHANGELOG.md")
    assert [line for line in listed.stdout.splitlines() if not line.startswith(allowed)] == []
