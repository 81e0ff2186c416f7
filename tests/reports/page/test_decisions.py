"""What a script decided by placeholders is on the page, most frequent first."""

from __future__ import annotations

import json
from pathlib import Path

from fsdpbench.reports.pages import write_report

HOSTILE = "<script>alert(1)</script>"


def test_decisions_have_their_own_table(sweep: Path, tmp_path: Path) -> None:
    copy = _copy(sweep, tmp_path)
    assert 'id="decisions"' not in write_report(copy).read_text()
    result = next(copy.glob("*/result.json"))
    content = json.loads(result.read_text())
    content["placeholder_decisions"] = [
        {"file": "/home/me/train.py", "line": 7, "operation": "<", "answer": True, "count": 2},
        {"file": f"/home/{HOSTILE}.py", "line": 9, "operation": HOSTILE, "answer": 0.0, "count": 1200},
    ]
    result.write_text(json.dumps(content))
    page = write_report(copy).read_text()
    section = page.partition('<section id="decisions"')[2].partition("</section>")[0]
    assert '<a href="#decisions">' in page
    assert HOSTILE not in section
    assert section.index("1,200") < section.index("train.py:7")
    assert "true" in section


def _copy(sweep: Path, target: Path) -> Path:
    """The run folder without its traces, which say nothing here."""
    copy = target / "run"
    for path in sweep.rglob("*"):
        if path.suffix in (".json", ".toml") and path.is_file():
            place = copy / path.relative_to(sweep)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return copy
