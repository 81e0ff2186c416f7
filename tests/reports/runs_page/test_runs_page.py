"""Several runs on one page: the best of each, and each configuration that they share, with its change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.pages import RunFolderError
from fsdpbench.reports.pages.ranking import rank
from fsdpbench.reports.pages.runs_page import mean_ratio, shared_configurations, write_runs_page
from fsdpbench.reports.pages.view import load_run


def write_run(folder: Path, speeds: dict[str, float | None], hardware: str) -> Path:
    """Configurations by their batch; None ran out of memory."""
    for number, (batch, speed) in enumerate(speeds.items()):
        point = folder / f"batch-{batch}-{number:08x}"
        point.mkdir(parents=True)
        config = {
            "name": f"batch-{batch}",
            "key": f"{number:08x}",
            "system": "impl-fsdp2",
            "model": "gpt-tiny",
        }
        config |= {"device": "cuda", "hardware": hardware, "gpus": 8, "settings": {"batch": batch}}
        (point / "config.json").write_text(json.dumps(config))
        result: dict[str, Any] = {"status": "oom", "device": "cuda"}
        if speed is not None:
            parts = {"compute_only": 0.1, "overlapped": 0.0, "exposed_communication": 0.1, "idle": 0.0}
            result = {"status": "ok", "device": "cuda", "step_time_s": 0.2, "tokens_per_s_per_gpu": speed}
            result |= {"samples_per_s_per_gpu": speed, "traced_step_time_s": 0.2, "time_s": parts}
        (point / "result.json").write_text(json.dumps(result))
    return folder


def cells(page: str, caption: str) -> list[list[str]]:
    table = re.search(rf"<caption[^>]*>{caption}</caption>(.*?)</table>", page, re.DOTALL)
    assert table is not None
    rows = re.findall(r"<tr>(.*?)</tr>", table[1], re.DOTALL)[1:]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_what_runs_share_is_compared(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", {"1": 100.0, "2": 200.0, "4": None}, "a100-80gb")
    after = write_run(tmp_path / "after", {"1": 110.0, "2": 300.0, "4": 50.0, "8": 400.0}, "h100-80gb")
    page = write_runs_page([before, after], tmp_path / "page.html").read_text()
    assert "The best of after gives +100 % over that of before" in page.replace("\u00a0", " ")
    assert [row[-3:] for row in cells(page, "Configurations that the runs share")] == [
        ["200.0", "300.0", "+50 %"],
        ["100.0", "110.0", "+10 %"],
        ["out of memory", "50.00", "–"],
    ]
    assert [row[1:3] for row in cells(page, "The best of each run")] == [
        ["before", "2 of 3"],
        ["after", "4 of 4"],
    ]
    shared = shared_configurations([rank(load_run(folder)) for folder in (before, after)])
    mean = mean_ratio(shared, 1)
    assert mean is not None
    assert mean == (pytest.approx((1.1 * 1.5) ** 0.5), pytest.approx(1.1), pytest.approx(1.5), 2)


def test_runs_without_anything_in_common(tmp_path: Path) -> None:
    some = write_run(tmp_path / "a" / "run", {"1": 100.0}, "a100-80gb")
    none = write_run(tmp_path / "b" / "run", {"2": None}, "a100-80gb")
    page = write_runs_page([some, none], tmp_path / "page.html").read_text()
    assert "b/run has no configuration that finished" in page
    with pytest.raises(RunFolderError, match="no such folder"):
        write_runs_page([some, tmp_path / "nowhere"], tmp_path / "page.html")
