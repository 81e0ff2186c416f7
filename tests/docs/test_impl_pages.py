"""What the pages on `impl` name exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "impl"


def test_the_page_places_every_file_of_impl() -> None:
    page = (ROOT / "docs" / "impl.md").read_text()
    table = page[page.index("| | files of `impl` |") : page.index("## What differs")]
    named = re.findall(r"`(\w+\.py)`", table)
    assert sorted(named) == sorted(
        path.name for path in (ROOT / "impl").glob("*.py") if path.name != "__init__.py"
    )


def test_the_line_counts_are_about_right() -> None:
    files = (ROOT / "docs" / "impl.md").read_text()
    counts = (ROOT / "docs" / "architecture.md").read_text()
    counts = counts[counts.index("## One runtime, two front ends") :]
    stated = {
        name: int(lines.replace(",", "")) for name, lines in re.findall(r"\| (.+?) \| ([\d,]+) \|", counts)
    }
    for name, told in stated.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \| (.+) \|$", files, re.MULTILINE)
        sizes = [
            len((ROOT / "impl" / file).read_text().splitlines()) for file in re.findall(r"`(\w+\.py)`", row)
        ]
        assert abs(sum(sizes) - told) <= 0.1 * told, (name, sum(sizes))
    assert len(stated) == 6


def test_what_the_page_on_fully_shard_names_as_proof_exists() -> None:
    page = (ROOT / "docs" / "impl-fsdp2.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and not row.startswith("| feature")]
    assert len(rows) > 40
    for row in rows:
        proofs = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", row.split("|")[2])
        assert proofs, row
        for file, name in proofs:
            source = (TESTS / file).read_text()
            assert not name or f"def {name}(" in source, f"{file} has no {name}"


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))


def test_what_the_page_on_fsdp1_names_as_proof_exists() -> None:
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
