"""Run the campaign file by file, those run longest ago first, and keep when each was run last.

    python ci/campaign.py ci/measured/campaign.csv [--minutes 60] [--limit 600] [FILE...]

The plain suite does not run these tests, so what breaks them is seen only here. A row of the table is a file
of tests: when and at which commit it was run, its result, and the seconds that it took. It is written
after each file; interrupted, the next call continues. Exit code 1: a test failed.

Past its limit no test of a file is begun, and one that takes half of the limit more is killed; the row counts
those that passed until then. The next time the tests run in an order drawn from the date: others are seen.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "campaign"]
PAST = "past its limit"
_STOPPED = "session-timeout:"
_FAILED = re.compile(r"^(?:FAILED|ERROR) \S+?::(\S+)", re.MULTILINE)
_FAILED_ON_ITS_WAY = re.compile(r"^\S+?::(.+) (?:FAILED|ERROR) +\[ *\d+%\]", re.MULTILINE)
_PASSED = re.compile(r"\bPASSED +\[ *\d+%\]")


@dataclass(frozen=True)
class Row:
    """The outcome of a file's campaign tests. `result`: `passed`, `failed: ...` or `past its limit`.

    `passed` counts those that passed, past its limit those until then.
    """

    file: str
    date: str
    commit: str
    tests: int
    passed: int
    seconds: int
    result: str


def campaign_files() -> dict[str, list[str]]:
    """Return the ids of the campaign's tests by file. Raises `CalledProcessError`, with pytest's code."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "-q"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cases = [line for line in listed.stdout.splitlines() if "::" in line]
    return {file: list(ids) for file, ids in groupby(cases, lambda case: case.partition("::")[0])}


def read(table: Path) -> dict[str, Row]:
    """Return the rows of earlier runs by file."""
    if not table.exists():
        return {}
    with table.open(newline="", encoding="utf-8") as lines:
        found = [
            Row(file, date, commit, int(tests), int(passed), int(seconds), result)
            for file, date, commit, tests, passed, seconds, result in list(csv.reader(lines))[1:]
        ]
    return {row.file: row for row in found}


def write(table: Path, rows: dict[str, Row]) -> None:
    """Write the rows, in the order of their files."""
    with table.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(rows[file]) for file in sorted(rows))


def run(file: str, words: list[str], tests: int, limit_s: float, commit: str) -> Row:
    """Run the campaign's tests of one file, and print the end of what they write if one fails.

    `words` name them to pytest: the file, or its tests in an order.
    """
    began = time.monotonic()
    with subprocess.Popen(
        [*PYTEST, "-v", f"--session-timeout={limit_s}", *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=1.5 * limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all processes that its tests started
            text = process.communicate()[0] + f"\n{_STOPPED}"
    passed, result = judged(text, tests, process.returncode)
    if result != "passed":
        print(text[-6000:], flush=True)
    seconds = round(time.monotonic() - began)
    today = datetime.now(UTC).date().isoformat()
    return Row(file, today, commit, tests, passed, seconds, result)


def judged(text: str, tests: int, code: int) -> tuple[int, str]:
    """Return how many tests passed by what pytest wrote and its exit code, and the result of their file."""
    names = _FAILED.findall(text) or _FAILED_ON_ITS_WAY.findall(text)
    passed, failed = len(_PASSED.findall(text)), " ".join(dict.fromkeys(names))
    past = _STOPPED in text
    if failed:
        return passed, f"failed: {failed}{f' ({PAST})' * past}"
    if past:
        return passed, "passed" if passed == tests else PAST
    return passed, f"failed: exit code {code}" if code else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("files", nargs="*", help="only these, whenever they were run")
    parser.add_argument("--minutes", type=float, default=60, help="after which no file is begun")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one file")
    asked = parser.parse_intermixed_args()
    head = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    cases, rows = campaign_files(), read(asked.table)
    rows = {file: row for file, row in rows.items() if file in cases}
    dates = {file: rows[file].date if file in rows else "" for file in cases}
    order = asked.files or sorted(cases, key=lambda file: (dates[file], len(cases[file]), file))
    end, wrong, cut_off = time.monotonic() + 60 * asked.minutes, 0, 0
    for file in order:
        if time.monotonic() > end:
            break
        words = [file]
        if file in rows and PAST in rows[file].result:
            words = random.Random(date.today().isoformat()).sample(cases[file], len(cases[file]))
        rows[file] = run(file, words, len(cases[file]), asked.limit, commit)
        wrong += rows[file].result.startswith("failed")
        cut_off += rows[file].result == PAST
        write(asked.table, rows)
        row = rows[file]
        print(f"{file}: {row.result} ({row.passed} of {row.tests}, {row.seconds} s)", flush=True)
    never = [file for file in cases if file not in rows]
    print(f"{len(rows)} of {len(cases)} files were run at some time")
    print(f"of those run now {wrong} failed and {cut_off} were past their limit")
    print("\n".join(f"never run: {file}" for file in never))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
