"""Data races and ranks that differ on the page: a section each, figures kept, nothing hostile gets out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdpbench.reports.pages import write_report

HOSTILE = "<script>alert(1)</script>"


def page_with(sweep: Path, tmp_path: Path, **fields: Any) -> str:
    """The page of a run whose first result has other fields."""
    copy = tmp_path / "run"
    for path in sweep.rglob("*"):
        if path.suffix in (".json", ".toml") and path.is_file():
            place = copy / path.relative_to(sweep)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    result = min(
        path for path in copy.glob("*/result.json") if json.loads(path.read_text())["status"] == "ok"
    )
    result.write_text(json.dumps(json.loads(result.read_text()) | fields))
    return write_report(copy).read_text()


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def test_races_most_frequent_first(sweep: Path, tmp_path: Path) -> None:
    def access(line: str) -> dict[str, Any]:
        return {
            "operation": HOSTILE,
            "access": "write",
            "stream": "stream 7",
            "line": line,
            "stack": [HOSTILE],
        }

    findings = [
        {"kind": "race", "count": count, "first": access(f"a.py:{count}"), "second": access("b.py:1")}
        for count in (3, 40)
    ]
    found = {"counts": {"race": 43}, "findings": findings}
    page = page_with(sweep, tmp_path, status="race", sanitizer=found, cause={"message": "x"})
    told = section(page, "races")
    assert HOSTILE not in told
    assert told.index("a.py:40") < told.index("a.py:3")
    assert "1 configuration has data races" in page


def test_a_clean_run_says_so(sweep: Path, tmp_path: Path) -> None:
    page = page_with(sweep, tmp_path, sanitizer={"counts": {}, "findings": []})
    assert "found no race" in section(page, "races")


def test_ranks_that_differ_with_both_stacks(sweep: Path, tmp_path: Path) -> None:
    frame = {"file": f"/home/{HOSTILE}.py", "line": 31, "function": "main", "own": True}
    difference = {
        "kind": "missing", "message": "rank 7 never joins all_reduce", "rank": 7, "other_rank": 0,
        "call": None, "stack": [], "other_call": "all_reduce(4 float32)", "other_stack": [frame],
    }  # fmt: skip
    check = {"ranks": [0, 7], "collectives": {}, "difference": difference}
    page = page_with(sweep, tmp_path, status="rank_mismatch", rank_check=check, cause={"message": "x"})
    told = section(page, "ranks-differ")
    assert "rank 7 never joins all_reduce" in told
    assert ".py:31 main" in told
    assert HOSTILE not in told
    assert "The ranks of 1 configuration call different collectives" in page
