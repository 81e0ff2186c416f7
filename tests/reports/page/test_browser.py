"""The page in a browser: drawn from disk without network or errors, and usable in every way it promises."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fsdpbench.reports.pages import write_report

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Any]

# Whether a canvas shows more than one colour: something was drawn on it.
_COLOURS = """(canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < pixels.length; i += 4) seen.add(pixels.slice(i, i + 4).join());
  return seen.size;
}
"""


@pytest.fixture(scope="module")
def report(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sweep, tmp_path_factory.mktemp("browser") / "report.html")


class Heard:
    """What pages complained about and asked for."""

    def __init__(self) -> None:
        self.complaints: list[tuple[str, str]] = []
        self.requested: list[str] = []

    def listen(self, page: Any) -> None:
        page.on("console", lambda message: self.complaints.append((message.type, message.text)))
        page.on("pageerror", lambda error: self.complaints.append(("error", str(error))))
        page.on("request", lambda request: self.requested.append(request.url))

    def nothing(self) -> None:
        """Nothing may have been fetched or complained about."""
        assert [text for kind, text in self.complaints if kind in ("error", "warning")] == []
        assert [url for url in self.requested if not url.startswith(("file:", "data:", "blob:"))] == []


def opened(chromium: Any, heard: Heard, path: Path, width: int = 1280, hash: str = "", **options: Any) -> Any:
    context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    heard.listen(page)
    page.goto(path.as_uri() + hash)
    page.wait_for_selector("#detail canvas")
    return page


@pytest.fixture
def open_page(chromium: Any) -> Iterator[OpenPage]:
    """Opens a file in a fresh context."""
    pages: list[Any] = []
    heard = Heard()

    def open_file(path: Path, **options: Any) -> Any:
        pages.append(opened(chromium, heard, path, **options))
        return pages[-1]

    yield open_file
    for page in pages:
        page.context.close()
    heard.nothing()


@pytest.fixture(scope="module")
def open_all_along(chromium: Any, report: Path) -> Iterator[tuple[Any, Heard]]:
    heard = Heard()
    page = opened(chromium, heard, report)
    yield page, heard
    page.context.close()


@pytest.fixture
def page(open_all_along: tuple[Any, Heard]) -> Iterator[Any]:
    """The page of `report`, as opened: drawing it anew takes longer than most tests.

    Whoever uses it brings it back by its own controls; where they fail, it is loaded again.
    """
    page, heard = open_all_along
    before = state(page)
    yield page
    heard.nothing()
    page.mouse.move(0, 0)
    page.get_by_role("button", name="Clear").click()
    by_place = page.locator("table.ranking thead th").first
    if by_place.get_attribute("aria-sort") != "ascending":
        by_place.locator("button").click()
    page.locator("#choice").select_option(index=0)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: state(page) == before, seconds=2)  # colours and sizes are drawn a moment later
    if state(page) != before:
        page.reload()
        page.wait_for_selector("#detail canvas")


def state(page: Any) -> tuple[Any, ...]:
    """What using the page changes, but for its address and which header it is sorted by."""
    canvas = page.locator("#detail canvas")
    drawn = canvas.evaluate("canvas => canvas.toDataURL()") if canvas.count() else None
    fields = page.eval_on_selector_all(
        ".filters input, .filters select", "all => all.map(each => each.value)"
    )
    return drawn, fields, shown_places(page), page.locator("#choice").input_value()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll from here: the page's policy forbids the strings that a browser would evaluate."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def shown_places(page: Any) -> list[str]:
    """The first column of the rows in sight, in their order."""
    return page.eval_on_selector_all(
        "table.ranking tbody tr",
        "rows => rows.filter(r => !r.hidden).map(r => r.cells[0].textContent.trim())",
    )


def column(page: Any, header: str) -> list[str]:
    """The texts of the column with that header, in sight, from the top."""
    return page.evaluate(
        """(name) => {
          const table = document.querySelector("table.ranking");
          const place = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.trim() === name);
          const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden);
          return rows.map((row) => row.cells[place].textContent.trim());
        }""",
        header,
    )


def test_all_charts_are_drawn(page: Any) -> None:
    bars = page.locator("#breakdown .trace.bars .point")
    assert bars.count() == 4 * 25
    assert page.locator("#memory-scatter .scatterlayer .trace").count() == 3
    assert page.locator("#memory-scatter .point").count() >= 25
    assert page.locator("#effects .scatterlayer .point").count() == 6
    assert page.locator('[data-chart="units"] .trace.bars .point').count() == 4 * 12
    assert page.locator('[data-chart="memory"] .scatterlayer .trace').count() == 2
    assert page.eval_on_selector("#detail canvas", _COLOURS) > 10


def test_the_page_does_not_scroll_sideways_at_any_width(page: Any) -> None:
    for width in (1280, 768, 420, 320, 1280):  # and back
        page.set_viewport_size({"width": width, "height": 900})
        # Plotly answers to a new size a moment later.
        wait_until(lambda limit=width: page.evaluate("document.documentElement.scrollWidth") <= limit)


@pytest.mark.campaign
def test_charts_fit_a_narrow_window(open_page: OpenPage, report: Path) -> None:
    page = open_page(report, width=420)
    widths = page.eval_on_selector_all(
        ".chart svg.main-svg", "all => all.map(each => each.getBoundingClientRect().width)"
    )
    assert widths
    assert max(widths) <= 400
    ticks = page.eval_on_selector_all(
        "#breakdown .yaxislayer-above text", "all => all.map(each => each.textContent)"
    )
    assert "1" in ticks


@pytest.mark.campaign
@pytest.mark.parametrize("bars", [1, 2, 4])
def test_in_a_narrow_window_legends_leave_the_bars_free(
    open_page: OpenPage, synthetic: ModuleType, tmp_path: Path, bars: int
) -> None:
    page = open_page(write_report(synthetic.write_sweep(tmp_path / "run", limit=bars)), width=420)
    chart = page.locator(".chart", has=page.locator("svg .barlayer .point")).first
    legend = chart.locator("g.legend rect.bg").bounding_box()
    drawn = chart.locator("g.barlayer").bounding_box()
    assert legend["y"] + legend["height"] <= drawn["y"]
    assert chart.locator("g.legend rect.scrollbar").bounding_box()["height"] == 0


def test_sorting_by_a_header_and_back(page: Any) -> None:
    header = page.locator("table.ranking thead th", has_text="step, ms")
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    figures = [float(text.replace(",", "")) for text in column(page, "step, ms") if text != "–"]
    assert figures == sorted(figures, reverse=True)
    assert column(page, "step, ms")[-5:] == ["–"] * 5
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    figures = [float(text.replace(",", "")) for text in column(page, "step, ms") if text != "–"]
    assert figures == sorted(figures)
    assert column(page, "step, ms")[-5:] == ["–"] * 5


def test_filtering_by_value_and_by_text(page: Any) -> None:
    assert len(shown_places(page)) == 30
    page.locator(".filters").get_by_label("wrap").select_option("root")
    assert set(column(page, "wrap")) == {"root"}
    page.get_by_label("status").select_option("out of memory")
    assert len(shown_places(page)) == 5
    assert page.locator(".shown").inner_text() == "5 of 30 configurations"
    page.get_by_role("button", name="Clear").click()
    assert len(shown_places(page)) == 30
    page.get_by_label("Find").fill("fsdp2 fp32")
    assert set(column(page, "system")) == {"impl-fsdp2"}
    assert len(shown_places(page)) == 3
    page.get_by_label("Find").fill("no such thing")
    assert shown_places(page) == []


def test_choosing_another_configuration(page: Any) -> None:
    before = page.eval_on_selector("#detail canvas", "canvas => canvas.toDataURL()")
    page.locator("#choice").select_option(label="16. impl-fsdp1 · block · pre · fp32 · 2")
    assert page.eval_on_selector("#detail canvas", "canvas => canvas.toDataURL()") != before
    assert "fp32" in page.locator("#detail dl.pairs").first.inner_text()
    assert page.locator("table.ranking tr.chosen th").inner_text() == "16"
    assert "#c=impl-fsdp1-block-pre-fp32-2-" in page.url
    page.get_by_role("button", name="Next").click()
    assert page.locator("table.ranking tr.chosen th").inner_text() == "17"
    page.get_by_role("button", name="Show configuration 3", exact=True).click()
    assert page.locator("#choice").input_value().startswith("impl-fsdp1-block-pre-bf16-off-")
    assert page.locator('[data-chart="memory"] .scatterlayer .trace').count() == 3, "retries are marked"
    assert "▼ allocator retry" in page.locator("#detail .keys").inner_text()


def test_a_configuration_without_figures_shows_what_happened(page: Any) -> None:
    page.locator("#choice").select_option(index=29)
    assert "tried to allocate 11.2 GiB" in page.locator("#detail .message.bad").inner_text()
    assert page.locator("#detail canvas").count() == 0


def test_the_address_leads_back_to_a_configuration(open_page: OpenPage, report: Path, sweep: Path) -> None:
    (folder,) = sweep.glob("impl-fsdp2-root-pre-bf16-*")
    page = open_page(report, hash=f"#c={folder.name}")
    assert page.locator("#choice").input_value() == folder.name


def test_a_bar_of_the_breakdown_chooses_its_configuration(page: Any) -> None:
    bar = page.locator("#breakdown .trace.bars").first.locator(".point").nth(4)
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + box["height"] / 2)
    page.mouse.click(box["x"] + 30, box["y"] + box["height"] / 2)
    wait_until(lambda: page.locator("tr.chosen th").inner_text() == "5")


def test_everything_works_by_keyboard(open_page: OpenPage, report: Path) -> None:
    page = open_page(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the ranked table"
    page.locator("table.ranking thead button").nth(6).focus()
    page.keyboard.press("Enter")
    assert page.locator("table.ranking thead th").nth(6).get_attribute("aria-sort") == "descending"
    page.locator(".choose").nth(2).focus()
    page.keyboard.press("Enter")
    assert page.locator("table.ranking tr.chosen .choose").get_attribute("aria-pressed") == "true"
    canvas = page.locator("#detail canvas")
    canvas.focus()
    whole = canvas.evaluate("canvas => canvas.toDataURL()")
    page.keyboard.press("+")
    zoomed = canvas.evaluate("canvas => canvas.toDataURL()")
    assert zoomed != whole
    page.keyboard.press("ArrowRight")
    assert canvas.evaluate("canvas => canvas.toDataURL()") != zoomed
    page.keyboard.press("0")
    assert canvas.evaluate("canvas => canvas.toDataURL()") == whole
    page.keyboard.press("ArrowDown")
    page.keyboard.press("n")
    said = page.locator(".timeline [role=status]").inner_text()
    assert re.search(r"unit blocks\.\d+|computation|FSDP event|phase", said)
    assert page.locator(".tip").is_visible()


def test_the_pointer_shows_what_it_is_over(page: Any) -> None:
    canvas = page.locator("#detail canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 36)
    tip = page.locator(".tip").inner_text()
    assert "computation" in tip
    assert "stream 7" in tip
    assert "ms" in tip
    page.mouse.move(box["x"] + 170, box["y"] + 64)
    assert "unit blocks.0" in page.locator(".tip").inner_text()


def test_dark_mode_redraws_charts_and_timeline(page: Any) -> None:
    fill = "() => getComputedStyle(document.querySelector('#breakdown .trace.bars .point path')).fill"
    light = page.evaluate(fill), page.eval_on_selector("#detail canvas", "canvas => canvas.toDataURL()")
    page.emulate_media(color_scheme="dark")
    wait_until(lambda: page.evaluate(fill) != light[0])
    assert page.eval_on_selector("#detail canvas", "canvas => canvas.toDataURL()") != light[1]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background))) < 60
    page.emulate_media(color_scheme="light")
    wait_until(lambda: page.evaluate(fill) == light[0])


def test_paper_is_light_and_without_controls_even_from_dark_mode(page: Any, tmp_path: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    wait_until(lambda: page.evaluate(background) != light)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    for selector in ("nav", ".filters", "#detail .tools button", ".copy"):
        assert not page.locator(selector).first.is_visible()
    assert page.locator("table.ranking tbody tr").last.is_visible()
    page.pdf(path=tmp_path / "page.pdf", prefer_css_page_size=True)
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
    page.emulate_media(media="screen", color_scheme="light")
    wait_until(lambda: page.evaluate(background) == light)


def test_hostile_names_are_shown_as_text(open_page: OpenPage, synthetic: ModuleType, tmp_path: Path) -> None:
    hostile = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\"'&<b>bold</b>"
    run = tmp_path / hostile.replace("/", "")
    for number, point in zip(range(3), synthetic.space(), strict=False):
        folder = synthetic.write_point(run, point, number)
        config = json.loads((folder / "config.json").read_text())
        config["system"] = hostile + "y" * 10_000 * (number == 1) + str(number)
        config |= {"name": hostile * 40, "model": hostile, "command": f"fsdpbench run '{hostile}'"}
        config["settings"]["wrap"] = f"{hostile}%{{x}}{number}"
        (folder / "config.json").write_text(json.dumps(config))
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(
            json.dumps(result | {"hardware": {"name": hostile, "source": hostile}})
        )
    page = open_page(write_report(run))
    assert page.evaluate("window.hit") is None
    assert page.locator("h1").inner_text() == run.name
    assert page.locator("img").count() == 0
    assert hostile in page.locator("#detail dl.pairs").first.inner_text()
    assert "<script>" in page.locator("#breakdown .yaxislayer-above").text_content()
    assert page.locator("#breakdown tspan[style*=bold]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.campaign
def test_two_hundred_configurations_open_from_less_than_fifteen_megabytes(
    open_page: OpenPage, many: Path
) -> None:
    assert many.stat().st_size < 15e6
    page = open_page(many)
    assert len(shown_places(page)) == 200
    assert page.locator("#breakdown .trace.bars .point").count() == 4 * 30
