"""The page of traces: its figures are those of the JSON; what cannot be a page is said."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from real_shapes import write_all
from trace_writing import TraceBuilder, build_fsdp_trace

from fsdpbench.cli import main
from fsdpbench.reports.pages import display


def analyze(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fsdpbench", "analyze", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def contents(page: str) -> list[dict[str, Any]]:
    """What the page's script draws, one for each trace."""
    found = re.findall(r'<script type="application/json" data-detail="[^"]*">(.*?)</script>', page, re.DOTALL)
    return [json.loads(each) for each in found]


def test_its_figures_are_those_of_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = build_fsdp_trace().write(tmp_path / "rank0_trace.json"), tmp_path / "page.html"
    words = [str(trace), "--hardware", "a100-80gb", "-o", str(page), "--json"]
    code, out, err = analyze(monkeypatch, capsys, *words)
    assert (code, err) == (0, f"wrote {page}\n")
    (rank,) = json.loads(out)["ranks"]
    text = page.read_text()
    (drawn,) = contents(text)
    tiles = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*?) <small>", text)
    share = {name: time / rank["duration_s"] for name, time in rank["time_s"].items()}
    assert dict(tiles) == {
        "Mean step": display.milliseconds(rank["step_time_s"]),
        "GPU computes": display.percent(share["compute_only"] + share["overlapped"]),
        "Waits for communication": display.percent(share["exposed_communication"]),
        "GPU idle": display.percent(share["idle"]),
    }
    assert html.escape(rank["verdict"]["sentence"])[:60] in text.replace("\u00a0", " ")
    steps = len(rank["steps"])
    for shown, told in zip(drawn["kernels"]["rows"], rank["kernels"], strict=True):
        speed = told["bytes_per_s"]
        assert shown == [
            told["name"], told["family"], display.count(told["count"] / steps),
            display.milliseconds(told["time_s"] / steps), display.number(told["mean_s"] * 1e6),
            display.percent(told["share"]), display.number(told["tflops"]),
            "–" if speed is None else display.number(speed / 1e9), display.percent(told["roof_share"]),
        ]  # fmt: skip
    assert any(row[8] != "–" for row in drawn["kernels"]["rows"]), "the roof of the links is known"
    assert "https://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


@pytest.mark.campaign
def test_traces_from_elsewhere_make_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").mkdir()
    traces = write_all(tmp_path / "traces")
    for trace in sorted(traces.iterdir()):
        page = tmp_path / f"{trace.name}.html"
        code, _, err = analyze(monkeypatch, capsys, str(trace), "-o", str(page))
        assert code == 0, err
        assert len(contents(page.read_text())) == 1


def test_what_cannot_be_a_page_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(build_fsdp_trace().write(tmp_path / "rank0_trace.json"))
    for words, code, told in (
        ([trace, "-o", str(tmp_path / "no" / "page.html")], 2, "there is no folder"),
        ([trace, "--against", trace, "-o", str(tmp_path / "page.html")], 2, "ask for one of both"),
        ([trace, "-o", str(tmp_path)], 2, "is a directory"),
    ):
        ended, _, err = analyze(monkeypatch, capsys, *words)
        assert (ended, told in err) == (code, True), err


def test_hostile_names_stay_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "</script><script>window.hit = 1</script>"
    built = TraceBuilder(deviceProperties=[{"name": hostile, "totalGlobalMem": "x"}])
    built.kernel(hostile, 1_000_000, 1_100_000)
    page = tmp_path / "page.html"
    code, _, err = analyze(monkeypatch, capsys, str(built.write(tmp_path / "t.json")), "-o", str(page))
    assert code == 0, err
    assert hostile not in page.read_text()
    assert contents(page.read_text())[0]["kernels"]["rows"][0][0] == hostile
