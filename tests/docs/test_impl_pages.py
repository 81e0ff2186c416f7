"""What the pages on `impl` name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "impl"
PROOFS = {path.name: path for path in TESTS.rglob("test_*.py")}

ROOMS = sorted(path.parent for path in (ROOT / "impl").rglob("__init__.py") if path.parent != ROOT / "impl")


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT / "impl")))
def test_a_rooms_readme_says_what_each_of_its_files_is(room: Path) -> None:
    rows = [row for row in (room / "README.md").read_text().splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row.split("|")[1])]
    assert sorted(named) == sorted(path.name for path in room.glob("*.py") if path.name != "__init__.py")


def test_impls_readme_leads_to_every_room() -> None:
    page = (ROOT / "impl" / "README.md").read_text()
    led_to = {ROOT / "impl" / link for link in re.findall(r"\]\(([\w/]+)/README\.md\)", page)}
    assert led_to == set(ROOMS)


def test_the_tests_folders_are_the_rooms_and_their_names_are_unique() -> None:
    files = list(TESTS.rglob("test_*.py"))
    assert len(PROOFS) == len(files), "two files of one name: the pages could mean either"
    rooms = {str(room.relative_to(ROOT / "impl")) for room in ROOMS}
    folders = {str(path.parent.relative_to(TESTS)) for path in files}
    assert folders <= rooms | {".", "benchmarks", "differential", "outcomes", "values"}


def test_what_the_page_on_fully_shard_names_as_proof_exists() -> None:
    page = (ROOT / "docs" / "impl-fsdp2.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and not row.startswith("| feature")]
    assert len(rows) > 40
    for row in rows:
        proofs = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", row.split("|")[2])
        assert proofs, row
        for file, name in proofs:
            assert file in PROOFS, file
            source = PROOFS[file].read_text()
            assert not name or f"def {name}(" in source, f"{file} has no {name}"


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))


def test_what_the_page_on_fsdp1_names_as_proof_exists() -> None:
    page = (ROOT / "docs" / "impl-fsdp1.md").read_text()
    named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_[\w*]+)?`", page)
    named = [(file, name) for file, name in named if file or name]
    assert len(named) > 40
    everywhere = set().union(*map(names_in, PROOFS.values()))
    for file, name in named:
        assert not file or file in PROOFS, file
        if name:
            there = names_in(PROOFS[file]) if file else everywhere
            pattern = name.replace("*", r"\w*")
            assert any(re.fullmatch(pattern, each) for each in there), (file, name)
