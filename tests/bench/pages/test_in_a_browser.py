"""Pages of `reproduce` and `atlas` in a browser: nothing is fetched or overflows, axe finds no fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsdpbench.answers.atlas.lookup import Atlas, write_pages

pytestmark = [pytest.mark.browser, pytest.mark.campaign]

WAYS = {
    "wide": {"viewport": {"width": 1440, "height": 900}},
    "narrow": {"viewport": {"width": 420, "height": 900}},
    "dark": {"viewport": {"width": 420, "height": 900}, "color_scheme": "dark"},
}


def an_atlas() -> dict[str, Any]:
    """Two chips: one that fits, one that does not; written by hand."""
    choice = {
        "settings": {"strategy": "FULL_SHARD", "activation_checkpointing": "full", "batch": 2, "seq": 4096},
        "tokens_per_s_per_gpu": 100.0,
        "step_time_s": 1.0,
        "command": "fsdpbench run --model llama-tiny",
        "interval": {"tokens_per_s_per_gpu": [90.0, 110.0]},
        "peak_reserved_bytes": 2**30,
        "mfu": 0.4,
    }
    cells = [
        {"model": "llama-tiny", "hardware": "h100-80gb", "gpus": 8, "status": "fits", "best": choice}
        | {"alternatives": [choice], "risky": [{**choice, "risky": True}]},
        {
            "model": "llama-tiny",
            "hardware": "a100-40gb",
            "gpus": 8,
            "status": "does_not_fit",
            "reason": "<b>",
        },
    ]
    return {
        "schema": 1,
        "system": "torch-fsdp2",
        "versions": {"torch": "2"},
        "models": {"llama-tiny": {"parameters": 1000}},
        "hardware": ["h100-80gb", "a100-40gb"],
        "gpus": [8],
        "cells": cells,
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from fsdpbench.lab.reproduce.catalogue import figures
    from fsdpbench.lab.reproduce.outcome import outcome_of
    from fsdpbench.lab.reproduce.page import write_page
    from fsdpbench.lab.reproduce.run import Runs

    folder = tmp_path_factory.mktemp("pages")
    chosen = figures(folder, ["2a", "2b"])
    ready = {name: found for figure in chosen for name, found in figure.ready.items()}
    outcomes = [outcome_of(figure, Runs(folder, {}, {}, ready)) for figure in chosen]
    write_page(folder / "paper.html", "fsdp-paper", outcomes, [[], []], 1.0)
    write_pages(folder, msgspec.convert(json.loads(json.dumps(an_atlas())), Atlas))
    return {
        "paper": folder / "paper.html",
        "atlas": folder / "index.html",
        "model": folder / "llama-tiny.html",
    }


@pytest.fixture
def opened(chromium: Any, pages: dict[str, Path]) -> Any:
    """Opens a page in a fresh context; afterwards nothing may have been fetched or complained about."""
    contexts, told = [], []

    def open_page(name: str, **options: Any) -> Any:
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else told.append(r.url))
        page.goto(pages[name].as_uri())
        page.wait_for_timeout(500)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert told == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["paper", "atlas", "model"])
def test_it_fits_the_window_and_has_no_serious_fault(opened: Callable[..., Any], name: str, way: str) -> None:
    page = opened(name, **WAYS[way])
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra `test`").Axe()
    faults = [
        f"{found['id']}: {found['nodes'][0]['html'][:200]}"
        for found in axe.run(page).response["violations"]
        if found["impact"] in ("serious", "critical")
    ]
    assert faults == []


def test_charts_are_drawn(opened: Callable[..., Any]) -> None:
    page = opened("paper")
    assert page.locator(".chart svg.main-svg").count() >= 2
    assert page.locator("#summary h2").inner_text().endswith("of 3 claims hold")
    assert page.locator("#summary td", has_text="not a test").count() == 2


def test_the_filter_keeps_what_matches_and_stands_in_the_address(opened: Callable[..., Any]) -> None:
    page = opened("atlas")
    assert page.locator("tbody tr:visible").count() == 2
    page.select_option("[data-key=hardware]", "a100-40gb")
    assert page.locator("tbody tr:visible").count() == 1
    assert page.locator(".shown").inner_text() == "1 of 2"
    assert page.url.endswith("#hardware=a100-40gb")
    page.fill("#find", "recomputation")
    assert page.locator("tbody tr:visible").count() == 0
    page.click("#clear")
    assert page.locator("tbody tr:visible").count() == 2
    assert "<b>" not in page.locator("tbody").inner_text()
