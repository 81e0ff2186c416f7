"""`--sanitize` from the command line: status `race`, exit 4, figures kept, the gate, refusals."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "side_stream_mean.py"
PAGE = Path(__file__).parents[2] / "docs" / "races.md"


def line_of(text: str) -> int:
    """Where the example says something."""
    return next(k for k, line in enumerate(EXAMPLE.read_text().splitlines(), 1) if text in line)


WRITES, READS = line_of("output = model("), line_of("running_mean.lerp_")


@pytest.fixture(scope="module")
def raced(fsdpbench: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("race")
    done = fsdpbench(
        "run", "--script", str(EXAMPLE), "--gpus", "8", "--sanitize", "--json", "-o", str(folder / "run")
    )
    return folder, done


def test_a_race_is_a_status_of_its_own(raced: tuple[Path, Any]) -> None:
    _, done = raced
    assert done.returncode == 4
    result = json.loads(done.stdout)
    assert result["status"] == "race"
    assert f"side_stream_mean.py:{READS})" in result["cause"]["message"]
    assert result["step_time_s"] > 0
    assert result["traces"]
    assert result["config"]["sanitize"] is True
    found = result["sanitizer"]
    assert found["counts"]["race"] == 7
    finding = found["findings"][0]
    assert finding["kind"] == "race"
    assert finding["first"]["line"].endswith(f"side_stream_mean.py:{WRITES}")
    assert finding["second"]["line"].endswith(f"side_stream_mean.py:{READS}")
    assert {each["kind"] for each in found["findings"][1:]} == {"use_after_free"}
    assert set(finding) == {"kind", "count", "bytes", "role", "first", "second", "hint"}


def test_the_terminal_says_it_in_lines_of_words(raced: tuple[Path, Any]) -> None:
    _, done = raced
    shown = PAGE.read_text().partition("--sanitize\nsanitizer: ")[2].partition("```")[0]
    for line in shown.splitlines():  # the documentation shows what the command says
        assert line.removesuffix("...").rstrip() in done.stderr, line


def test_the_page_lists_it(raced: tuple[Path, Any], fsdpbench: Any) -> None:
    folder, _ = raced
    fsdpbench("report", str(folder / "run"))
    page = (folder / "run" / "report.html").read_text()
    section = page.partition('<section id="races"')[2].partition("</section>")[0]
    assert f"side_stream_mean.py:{READS}" in section
    assert "aten::mean" in section


def test_the_mended_script_is_clean(fsdpbench: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXAMPLE.read_text().replace("# Missing: ", ""))
    done = fsdpbench("run", "--script", str(script), "--gpus", "8", "--sanitize", "-o", str(tmp_path / "run"))
    assert "sanitizer: no race in" in done.stderr


@pytest.mark.campaign
def test_a_sweep_remembers_that_it_sanitizes(fsdpbench: Any, tmp_path: Path) -> None:
    named = ("--model", "gpt-tiny", "--gpus", "8", "--system", "impl-fsdp2,torch-fsdp2")
    settings = ("--set", "backward_prefetch=pre", "--set", "batch=2")
    folder = tmp_path / "run"
    done = fsdpbench("sweep", *named, *settings, "--sanitize", "--json", "-o", str(folder))
    results = json.loads(done.stdout)["results"]
    assert len(results) >= 2
    for result in results:
        assert result["status"] == "ok"
        assert result["sanitizer"]["findings"] == []
        assert "sanitized" in result["name"]
    assert tomllib.loads((folder / "sweep.toml").read_text())["sanitize"] is True
    again = fsdpbench("sweep", str(folder / "sweep.toml"), "-o", str(folder), "--json")
    assert [each["name"] for each in json.loads(again.stdout)["results"]] == [r["name"] for r in results]


def test_refused_where_nothing_is_simulated(fsdpbench: Any, tmp_path: Path) -> None:
    done = fsdpbench("run", "--model", "gpt-125m", "--device", "cpu", "--gpus", "2", "--sanitize")
    assert done.returncode == 2
    assert "--sanitize" in done.stderr
    assert "--device sim" in done.stderr
