"""The atlas as static pages: an overview with a filter, and a page a model. Nothing is loaded."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fsdpbench.atlas import words
from fsdpbench.atlas.lookup import Atlas
from fsdpbench.files.whole_files import write_whole
from fsdpbench.reports.page import display
from fsdpbench.reports.page.offline import own_file, policy

OVERVIEW = "index.html"


def write_pages(folder: Path, atlas: Atlas) -> Path:
    """Write overview and models' pages into `folder`; the overview's path."""
    script = Markup(_own("page.js"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    common: dict[str, Any] = {
        "atlas": atlas,
        "words": words,
        "display": display,
        "policy": policy(script),
        "css": Markup(own_file("page/assets/report.css")),
        "script": script,
        "page_of": page_of,
        "overview": OVERVIEW,
    }
    template = environment.from_string(_own("page.html.jinja"))
    for name in atlas.models:
        cells = [cell for cell in atlas.cells if cell.model == name]
        write_whole(folder / page_of(name), template.render(**common, model=name, cells=cells))
    write_whole(folder / OVERVIEW, template.render(**common, model=None, cells=atlas.cells))
    return folder / OVERVIEW


def page_of(model: str) -> str:
    """The file of a model's page."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', model)}.html"


def _own(name: str) -> str:
    return resources.files("fsdpbench.atlas").joinpath(name).read_text(encoding="utf-8")
