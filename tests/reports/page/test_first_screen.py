"""The first screen: the verdict, code to copy, and one chart; and six sheets of paper."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fsdpbench.reports.pages import load_run, write_report
from fsdpbench.reports.pages.ranking import metric_of, rank
from fsdpbench.reports.pages.recommendation import code_to_copy, overview_chart


def test_three_lines_one_chart_and_the_code_of_the_best(sweep: Path, tmp_path: Path) -> None:
    view = load_run(sweep)
    ranked = rank(view)
    page = write_report(sweep, tmp_path / "report.html").read_text()
    first_screen = page[page.index('id="verdict"') : page.index("</section>")]
    assert first_screen.count('class="sentence"') == 3
    assert first_screen.count('class="chart"') == 1
    chart = overview_chart(view, ranked, metric_of(view))
    assert chart is not None
    places = [int(row[0]) for row in chart.table.rows]
    assert places[0] == 1
    assert places[-1] == max(each.place for each in ranked if each.throughput)
    systems = {str(ranked[place - 1].row.settings["system"]) for place in places}
    assert systems == {"impl-fsdp1", "impl-fsdp2"}


def test_code_that_the_sweep_left_comes_before_the_command(synthetic: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    synthetic.write_point(run, next(synthetic.space()), 0)
    view = load_run(run)
    assert [each.name for each in code_to_copy(view, "fsdpbench run")] == ["run it again"]
    (run / "best_torch_fsdp2.py").write_text("fully_shard(model)  # </script>")
    (run / "best_too_long.py").write_text("x" * 30_000)
    assert [each.name for each in code_to_copy(view, "fsdpbench run")] == [
        "best_torch_fsdp2.py",
        "run it again",
    ]
    page = write_report(run).read_text()
    assert "fully_shard(model)  # &lt;/script&gt;" in page


@pytest.mark.browser
@pytest.mark.campaign
def test_one_screen_and_at_most_six_sheets(chromium: Any, sweep: Path, tmp_path: Path) -> None:
    page = chromium.new_page(viewport={"width": 1440, "height": 900})
    page.goto(write_report(sweep, tmp_path / "report.html").as_uri())
    page.wait_for_selector("#detail canvas")
    bottom = page.evaluate("document.getElementById('verdict').getBoundingClientRect().bottom")
    assert bottom <= 900
    page.pdf(path=tmp_path / "page.pdf", prefer_css_page_size=True)
    sheets = len(re.findall(rb"/Type\s*/Page[^s]", (tmp_path / "page.pdf").read_bytes()))
    page.close()
    assert sheets <= 6
