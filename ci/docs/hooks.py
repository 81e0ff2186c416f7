"""What the site builder asks of this project: pages that are made, and links that fit the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import repository
from mkdocs.structure.files import File, Files
from settings_page import settings_page

_ORIGINS: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, the settings, and sources that pages link to."""
    pages = {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    starts = pages | {path for path in repository.PLACES if (repository.ROOT / path).exists()}
    for path in sorted(starts - pages) + repository.outside(starts):
        files.append(File.generated(config, repository.place(path), content=repository.page(path)))
        _ORIGINS[repository.place(path)] = repository.origin(path)
    files.append(File.generated(config, "reference/settings.md", content=settings_page()))
    _ORIGINS["reference/settings.md"] = "docs/reference/settings.md"
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let every link lead to where the site has its file; sources are not searched."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    return repository.rewritten(markdown, _ORIGINS.get(uri, f"docs/{uri}"), uri)
