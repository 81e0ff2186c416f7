"""axe-core's rules on the page: no fault that keeps somebody from using it, in light, in dark, and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fsdpbench.reports.pages import write_report

pytestmark = pytest.mark.browser

_SERIOUS = ("serious", "critical")


# Both front ends, each value of each setting, one with retries, one out of memory: more show nothing new.
_POINTS = (0, 1, 2, 8, 14, 19, 20, 25)


@pytest.fixture(scope="module")
def report(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("accessibility") / "run"
    for number, point in enumerate(synthetic.space()):
        if number in _POINTS:
            synthetic.write_point(run, point, number)
    return write_report(run)


@pytest.fixture
def context(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A browser context with the options of the test's parameter."""
    opened = chromium.new_context(**request.param)
    yield opened
    opened.close()


def faults(page: Any) -> list[str]:
    """What axe-core calls serious or critical: its rule, and the first element that breaks it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra `test`").Axe()
    violations = axe.run(page).response["violations"]
    return [
        f"{found['id']} ({found['impact']}, {len(found['nodes'])} times): {found['help']}: "
        f"{found['nodes'][0]['html'][:200]}"
        for found in violations
        if found["impact"] in _SERIOUS
    ]


@pytest.mark.parametrize(
    "context",
    [
        pytest.param({"color_scheme": "light", "viewport": {"width": 1280, "height": 900}}, id="light"),
        pytest.param(
            {"color_scheme": "dark", "viewport": {"width": 420, "height": 900}},
            id="dark, narrow",
            marks=pytest.mark.campaign,
        ),
    ],
    indirect=True,
)
def test_axe_finds_no_serious_fault(context: Any, report: Path) -> None:
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.goto(report.as_uri())
    page.wait_for_selector("#detail canvas")
    assert faults(page) == []


@pytest.mark.parametrize("context", [{}], indirect=True)
def test_axe_would_find_one(context: Any) -> None:
    page = context.new_page()
    page.set_content("<html><body><img src='data:,'><input></body></html>")
    found = faults(page)
    assert any(fault.startswith("image-alt") for fault in found)
