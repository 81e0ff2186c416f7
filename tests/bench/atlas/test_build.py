"""`fsdpbench atlas build` for real: killed between two runs it resumes, and its page filters in a browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PARTS = ["--models", "llama-tiny,gpt-tiny", "--hardware", "a100-80gb,h100-80gb", "--gpus", "8,16"]


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_killed_and_started_again_it_goes_on(
    tmp_path: Path, matches_schema: Callable[[str, Any], None]
) -> None:
    folder = tmp_path / "atlas"
    words = ["atlas", "build", *PARTS, "-o", str(folder), "--jobs", "1"]
    command = [sys.executable, "-m", "fsdpbench", *words]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(list((folder / "runs").glob("torch*"))) < 3:
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in (folder / "runs").glob("torch*")}
    assert len(finished) >= 3
    assert not (folder / "atlas.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    assert {name: (folder / "runs" / name).stat().st_mtime_ns for name in finished} == finished
    content = json.loads((folder / "atlas.json").read_text())
    matches_schema("atlas", content)
    assert len(content["cells"]) == 8
    assert all(cell["status"] == "fits" for cell in content["cells"])
    _filter(folder / "index.html")


def _filter(page: Path) -> None:
    """One model and one number of GPUs are left of all cells, and the address says so."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the Debian package chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        rows = tab.locator("tr[data-model]:visible")
        assert rows.count() == 8
        tab.locator("select[data-key=model]").select_option("llama-tiny")
        tab.locator("select[data-key=gpus]").select_option("16")
        assert rows.count() == 2
        assert "llama-tiny" in tab.url
        browser.close()
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
