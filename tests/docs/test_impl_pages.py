"""What the pages on `impl` name exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
            source = (ROOT / "tests" / "impl" / file).read_text()
            assert not name or f"def {name}(" in source, f"{file} has no {name}"
