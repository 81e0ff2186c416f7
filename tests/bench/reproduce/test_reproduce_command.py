"""`fsdpbench reproduce` as people use it: figures by name, page and JSON, resuming, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fsdp-papers"], "Did you mean fsdp-paper?"),
        (["fsdp-paper", "--only", "6d"], "Did you mean 6"),
        (["fsdp-paper", "--only", ","], "names no figure"),
        (["fsdp-paper", "--jobs", "0"], "0 is not in the range"),
    ],
)
def test_wrong_names_are_one_line_and_exit_2(
    fsdpbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fsdpbench("reproduce", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_figures_of_the_network_need_no_simulated_run(fsdpbench: Any, tmp_path: Path) -> None:
    document = fsdpbench.json(
        "reproduce", "fsdp-paper", "--only", "2B, 2a", "-o", str(tmp_path / "out"), "--json"
    )
    assert document == json.loads((tmp_path / "out" / "fsdp-paper.json").read_text())
    assert [figure["name"] for figure in document["figures"]] == ["2a", "2b"]
    (pieces,) = (figure for figure in document["figures"] if figure["name"] == "2b")
    first = pieces["points"][0]
    assert first["published"] == 92.1
    assert first["band"][0] <= first["simulated"] <= first["band"][1]
    page = (tmp_path / "out" / "fsdp-paper.html").read_text()
    assert page.count('<section id="fig-') == 2
    assert "default-src &#39;none&#39;" in page
    assert 'src="http' not in page
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "fsdp-paper.html",
        "fsdp-paper.json",
    ]


def test_a_file_in_the_place_of_the_folder_is_said(fsdpbench: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    done = fsdpbench("reproduce", "fsdp-paper", "--only", "2a", "-o", str(tmp_path / "out"))
    assert done.returncode == 5
    assert str(tmp_path / "out") in done.stderr


@pytest.mark.campaign
def test_killed_and_started_again_it_goes_on(tmp_path: Path) -> None:
    """SIGKILL strikes between two runs: the second command keeps what is there."""
    words = ["reproduce", "fsdp-paper", "--only", "104509", "-o", str(tmp_path / "out"), "--jobs", "1"]
    command = [sys.executable, "-m", "fsdpbench", *words]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    runs = tmp_path / "out" / "runs"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and len(list(runs.glob("torch*"))) < 2:
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in runs.glob("torch*")}
    assert len(finished) >= 2
    assert not (tmp_path / "out" / "fsdp-paper.html").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert {name: (runs / name).stat().st_mtime_ns for name in finished} == finished
    (figure,) = json.loads((tmp_path / "out" / "fsdp-paper.json").read_text())["figures"]
    assert all(point["status"] == "ok" for point in figure["points"])
    assert {claim["verdict"] for claim in figure["claims"]} <= {"holds", "fails", "depends"}


@pytest.mark.campaign
def test_traces_explain_the_prefetch(fsdpbench: Any, tmp_path: Path) -> None:
    (figure,) = fsdpbench.json(
        "reproduce", "fsdp-paper", "--only", "5", "-o", str(tmp_path / "out"), "--json"
    )["figures"]
    on, off = figure["contrasts"][1]["runs"]
    assert off["exposed_communication_ms"] > 10 * on["exposed_communication_ms"]
    assert off["step_ms"] > 1.1 * on["step_ms"]
    page = (tmp_path / "out" / "fsdp-paper.html").read_text()
    assert page.count("data-timeline=") == 3
