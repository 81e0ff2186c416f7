"""The page as a file: whole, offline, escaped, bounded, the same every time."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
from plotly.offline import get_plotlyjs

from fsdpbench.base import writing
from fsdpbench.reports.pages import RunFolderError, write_report

HOSTILE = "<script>alert(1)</script>\"'&--><!--{{7*7}}]]></style>"


class Page(HTMLParser):
    """What a browser would see: scripts by their attributes, links, and all text outside scripts."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self._open: dict[str, str | None] | None = None
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "script":
            self.scripts.append((attributes, ""))
            self._open = attributes
        if tag == "a" and attributes.get("href"):
            self.links.append(str(attributes["href"]))
        if tag != "a":
            self.fetched += [str(attributes[name]) for name in ("src", "href") if attributes.get(name)]

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        else:
            self.text += data


@pytest.fixture(scope="module")
def path(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sweep, tmp_path_factory.mktemp("out") / "page.html")


@pytest.fixture(scope="module")
def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_plotlys_script_is_in_the_page_exactly_once(path: Path, page: Page) -> None:
    plotly = get_plotlyjs()
    assert sum(text == plotly for _, text in page.scripts) == 1
    assert path.read_text(encoding="utf-8").count("plotly.js v") == 1


def test_nothing_is_fetched_and_only_the_pages_own_scripts_may_run(path: Path, page: Page) -> None:
    assert page.fetched == ["data:,"]
    runnable = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    assert len(runnable) == 2
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', path.read_text(encoding="utf-8"))
    assert policy is not None
    assert "default-src 'none'" in policy[1].replace("&#39;", "'")
    assert policy[1].count("sha256-") == 2


def test_every_island_is_json(page: Page) -> None:
    islands = [text for attributes, text in page.scripts if attributes.get("type") == "application/json"]
    assert len(islands) == 34  # Four charts of the run and thirty configurations.
    for text in islands:
        json.loads(text)


def test_links_lead_to_files_from_where_the_page_lies(path: Path, page: Page) -> None:
    local = [link for link in page.links if not link.startswith("#")]
    assert any(link.endswith("rank0_trace.json.gz") for link in local)
    assert all((path.parent / unquote(link)).is_file() for link in local)


def test_what_was_run_is_said_and_that_it_is_simulated(page: Page) -> None:
    for words in (
        "gpt-2.8b",
        "a100-80gb",
        "NVIDIA A100 datasheet",
        "Every figure on this page comes from simulated GPUs",
    ):
        assert words in page.text
    assert "fsdpbench run --model gpt-2.8b" in page.text


def test_the_page_is_the_same_every_time_and_of_bounded_size(sweep: Path, path: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    again = write_report(sweep, path.parent / "again.html")
    assert again.read_bytes() == path.read_bytes()
    assert path.stat().st_size < 10e6


def test_a_page_stays_while_its_content_does(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = synthetic.write_sweep(tmp_path / "run", traces=False, limit=2)
    page = write_report(run)

    def stays() -> bool:
        before = page.lstat()
        write_report(run)
        assert page.read_bytes().rstrip().endswith(b"-->")
        return page.lstat().st_ino == before.st_ino

    assert stays()
    page.write_bytes(page.read_bytes().replace(b"gpt-2.8b", b"gpt-2.9b"))
    assert not stays()
    result = next(run.glob("*/result.json"))
    result.write_text(result.read_text() + " ")
    assert not stays()
    monkeypatch.setenv("FSDPBENCH_TRACE_LIMITS", "events=1000")
    assert not stays()
    page.rename(run / "page")
    page.symlink_to("page")
    assert not stays()
    assert not page.is_symlink()


def test_the_default_place_is_in_the_folder_and_no_rest_is_left(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    run = synthetic.write_sweep(tmp_path / "My sweep", traces=False, limit=2)
    assert write_report(run) == run / "report.html"
    assert '<h1 class="clip">My sweep</h1>' in (run / "report.html").read_text(encoding="utf-8")
    assert [each.name for each in run.iterdir() if each.name.endswith(".tmp")] == []


def test_hostile_texts_from_files_are_only_text(synthetic: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / HOSTILE.replace("/", "")
    folder = synthetic.write_point(run, next(synthetic.space()), 1)
    synthetic.write_point(run, next(synthetic.space()), 2, trace=False)
    config = json.loads((folder / "config.json").read_text())
    for name in ("name", "model", "system", "command", "key"):
        config[name] = HOSTILE + "x" * 10_000
    config["settings"]["wrap"] = HOSTILE
    config["settings"][HOSTILE] = HOSTILE
    (folder / "config.json").write_text(json.dumps(config))
    result = json.loads((folder / "result.json").read_text())
    result |= {
        "hardware": {"name": HOSTILE, "source": HOSTILE, HOSTILE: HOSTILE},
        "environment": {HOSTILE: [HOSTILE]},
    }
    (folder / "result.json").write_text(json.dumps(result))
    (run / "sweep.toml").write_text(HOSTILE)
    trace = folder / "trace" / "rank0_trace.json.gz"
    text = (
        gzip.decompress(trace.read_bytes())
        .decode()
        .replace("blocks.3", HOSTILE.replace('"', "").replace("'", ""))
    )
    trace.write_bytes(gzip.compress(text.encode()))
    out = write_report(run)
    page = Page(out.read_text(encoding="utf-8"))
    runnable = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    assert len(runnable) == 2
    assert all("alert(1)" not in text for text in runnable)
    assert HOSTILE in page.text
    assert out.stat().st_size < 6e6


@pytest.mark.parametrize(
    ("damage", "words"),
    [(b"", "empty"), (b"\x1f\x8bgarbage", ""), (gzip.compress(b'{"traceEvents": [{"ph"', mtime=0), "")],
    ids=["empty", "no gzip", "cut off"],
)
def test_a_broken_trace_leaves_its_message_in_place_of_the_charts(
    synthetic: ModuleType, tmp_path: Path, damage: bytes, words: str
) -> None:
    run = synthetic.write_sweep(tmp_path / "run", limit=2)
    trace = next(run.glob("impl-fsdp1-block-pre-bf16-2-*/trace/*.gz"))
    trace.write_bytes(damage)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    details = {a["data-detail"]: json.loads(text) for a, text in page.scripts if "data-detail" in a}
    broken, sound = (
        details[trace.parent.parent.name],
        next(d for f, d in details.items() if f != trace.parent.parent.name),
    )
    assert broken["timeline"] is None
    assert any("rank0_trace.json.gz is not shown" in line and words in line for line in broken["warnings"])
    assert sound["timeline"]["rows"]


def test_a_run_without_anything_finished_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('points = ["a-00000001"]\n')
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "No configuration has finished yet." in page.text


@pytest.mark.timeout(20)
def test_a_pipe_in_its_place_that_nobody_reads_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_READER_PATIENCE_S", 0.1)
    (tmp_path / "sweep.toml").write_text('points = ["a-00000001"]\n')
    os.mkfifo(tmp_path / "report.html")
    with pytest.raises(OSError, match="no process reads this pipe"):
        write_report(tmp_path)


def test_a_folder_without_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_name_is_no_text_has_a_page(sweep: Path, tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"run-\xff")
    shutil.copytree(sweep, run)
    assert write_report(run).read_bytes().decode("utf-8")
