"""The table of the campaign: what pytest wrote until it ended or was killed, as a row's result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import campaign  # noqa: E402

TESTS = """
import time
import pytest

@pytest.mark.parametrize("number", range(4))
def test_one(number):
    time.sleep({seconds})
    assert number not in {wrong}
"""


def result_of(tmp_path: Path, seconds: float, wrong: set[int], limit_s: float) -> tuple[int, str]:
    path = tmp_path / "test_of_the_table.py"
    path.write_text(TESTS.format(seconds=seconds, wrong=wrong or "()"))
    words = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-v", str(path)]
    done = subprocess.run(
        [*words, "-c", str(ROOT / "pyproject.toml"), f"--session-timeout={limit_s}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    return campaign.judged(done.stdout, 4, done.returncode)


@pytest.mark.parametrize(
    ("seconds", "wrong", "limit_s", "expected"),
    [
        (0.0, set(), 60, (4, "passed")),
        (0.0, {1}, 60, (3, "failed: test_one[1]")),
        (0.3, set(), 0.1, (1, "past its limit")),
        (0.3, {0}, 0.1, (0, "failed: test_one[0] (past its limit)")),
    ],
)
def test_what_pytest_writes_is_counted(
    tmp_path: Path, seconds: float, wrong: set[int], limit_s: float, expected: tuple[int, str]
) -> None:
    assert result_of(tmp_path, seconds, wrong, limit_s) == expected


def test_a_killed_run_counts_the_lines_it_wrote() -> None:
    text = "a.py::test_one[a b] PASSED [ 25%]\na.py::test_one[c] FAILED  [ 50%]\na.py::test_one[d] "
    assert campaign.judged(text + "\nsession-timeout:", 4, -9) == (
        1,
        "failed: test_one[c] (past its limit)",
    )


def test_a_run_that_pytest_could_not_begin_has_failed() -> None:
    assert campaign.judged("ERROR: file not found: a.py", 4, 4) == (0, "failed: exit code 4")


def test_rows_stay_as_they_were_written(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    old = campaign.Row("tests/a.py", "2026-11-28", "e6925a37", 3, 2, 10, "past its limit")
    rows = {
        "tests/a.py": old,
        "tests/b.py": campaign.Row("tests/b.py", "2026-11-28", "1", 1, 1, 5, "passed"),
    }
    campaign.write(table, rows)
    assert campaign.read(table) == rows
