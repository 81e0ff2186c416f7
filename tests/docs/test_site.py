"""The documentation site: its navigation is complete, it builds, and it opens without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "ci" / "docs")]
import repository  # noqa: E402


class _Loader(yaml.SafeLoader):
    """YAML; Python names of the site builder are left alone."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)
SETTINGS: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)


def listed(entries: list[Any]) -> Iterator[str]:
    """The pages of the navigation."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from listed(value)
        else:
            yield value


def test_every_page_is_in_the_navigation_once() -> None:
    pages = list(listed(SETTINGS["nav"]))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) == len(set(pages))
    assert set(pages) == there | set(repository.PLACES.values())


def test_readme_leads_to_every_page() -> None:
    led_to = repository.links((ROOT / "README.md").read_text(), "README.md")
    pages = {f"docs/{page}" for page in listed(SETTINGS["nav"])} & {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    behind = set().union(*(repository.links((ROOT / page).read_text(), page) for page in led_to & pages))
    assert pages <= led_to | behind


def test_links_of_the_repository_lead_to_places_of_the_site() -> None:
    moved = repository.rewritten
    assert moved("[a](docs/gate.md#figures)", "README.md", "index.md") == "[a](gate.md#figures)"
    assert moved("[b](../../impl)", "docs/how-to/x.md", "how-to/x.md") == "[b](../source/impl/index.md)"
    assert moved("[c](../README.md)", "docs/x.md", "x.md") == "[c](index.md)"
    assert moved("[`d`](docs/examples/oom.txt)", "README.md", "index.md").endswith(
        "(source/docs/examples/oom.txt.md)"
    )
    untouched = "[e](https://pytorch.org) ![f](nowhere.png)\n```\n[g](docs/gate.md)\n```\n"
    assert moved(untouched, "README.md", "index.md") == untouched


def test_messages_on_the_page_of_messages_are_ones_that_the_code_has() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = re.findall(r"^\| (?:`` (.+?) ``|`([^`]+)`) \|", page, re.MULTILINE)
    folders = ("fsdpbench", "reports", "impl")
    kinds = ("*.py", "errors.toml")
    sources = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    code = " ".join(" ".join(path.read_text().split()) for path in sources)
    code = re.sub(r'"\s+f?"', "", code)
    messages = [doubled or single for doubled, single in named]
    assert len(messages) >= 12
    assert [message for message in messages if message not in code] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: FSDPBENCH_SITE, or built here."""
    if built := os.environ.get("FSDPBENCH_SITE"):
        return (ROOT / built).resolve()
    command = os.environ.get("MKDOCS") or shutil.which("mkdocs")
    if command is None:
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]', or name it by MKDOCS")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [command, "build", "--strict", "-q", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.campaign
def test_the_site_opens_from_disk_without_a_request_and_can_be_searched(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the Debian package chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        requests: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for uri in listed(SETTINGS["nav"]):
            page.goto((site / uri).with_suffix(".html").as_uri())
            assert page.locator("h1").first.inner_text()
        page.locator(".md-search__input").click()
        page.keyboard.type("reduce-scatter")
        page.wait_for_selector(".md-search-result__item", state="attached")
        browser.close()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []


@pytest.mark.campaign
def test_nothing_in_the_site_would_be_fetched(site: Path) -> None:
    loads = r"<(?:script|img|iframe|source)[^>]+src=[\"']?https?:"
    styles = r"<link[^>]+rel=[\"']?(?:stylesheet|preload|preconnect)[^>]+href=[\"']?https?:"
    fetched = re.compile(f"{loads}|{styles}")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    assert [page.name for page in pages if fetched.search(page.read_text())] == []


def test_the_page_on_validation_has_the_table_of_the_residuals() -> None:
    """`python ci/measure_residuals.py` prints it from the packaged table."""
    spec = importlib.util.spec_from_file_location("measure_residuals", ROOT / "ci" / "measure_residuals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.coverage().strip() in (ROOT / "docs" / "validation.md").read_text()
