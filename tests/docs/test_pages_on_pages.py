"""The commands of watch.md, and those of analysis.md and gate.md about pages, run as they stand there."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from fsdpbench.cli import main

ROOT = Path(__file__).resolve().parents[2]


def commands(page: str, start: str) -> list[str]:
    """The lines of a page's blocks that begin so."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = [block for number, block in enumerate(re.split(r"^```", text, flags=re.MULTILINE)) if number % 2]
    return [line for block in blocks for line in block.splitlines() if line.startswith(start)]


def run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().out


@pytest.mark.campaign
def test_a_sweep_is_watched_analysed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep, watch = commands("watch", "fsdpbench")
    assert run(sweep, monkeypatch, capsys)[0] == 0
    code, told = run(watch, monkeypatch, capsys)
    assert code == 0
    assert told.startswith("3/3 configurations")
    trace = next((tmp_path / "runs" / "tiny").glob("*/trace/*.json.gz"))
    shutil.copy(trace, tmp_path / "trace.json.gz")
    (analyze,) = commands("analysis", "fsdpbench analyze trace.json.gz -o")
    code, told = run(analyze, monkeypatch, capsys)
    assert code == 0
    assert (tmp_path / "trace.html").stat().st_size > 10_000
    shutil.copytree(tmp_path / "runs" / "tiny", tmp_path / "runs" / "before")
    shutil.copytree(tmp_path / "runs" / "tiny", tmp_path / "runs" / "after")
    (report,) = commands("gate", "fsdpbench report")
    assert run(report, monkeypatch, capsys)[0] == 0
    assert "Configurations that the runs share" in (tmp_path / "both.html").read_text()


def test_the_history_of_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of this repository's own baseline; a clone without a history has one commit, and says so."""
    (history,) = commands("gate", "fsdpbench check --history")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "sys.argv", shlex.split(history.replace("history.html", str(tmp_path / "history.html")))
    )
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    if ended.value.code == 2 and "git" in told.err:
        pytest.skip("not a checkout")
    assert ended.value.code in (0, 3), told.err  # 3: no commit has figures for this torch
    if ended.value.code == 0:
        assert (tmp_path / "history.html").is_file()
