"""Hooks of the site builder: pages that are made, and links that fit the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import repository
from constants_page import constants_sections
from keys_page import keys_table
from mkdocs.structure.files import File, Files
from rules_page import rules_table
from runs_page import runs_table
from settings_page import settings_sections

_ORIGINS: dict[str, str] = {}
_APPENDED = {
    "gate.md": rules_table,
    "reference/constants.md": constants_sections,
    "reference/profile-keys.md": keys_table,
    "reference/published-runs.md": runs_table,
    "reference/settings.md": settings_sections,
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root and the sources that pages link to."""
    pages = {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    starts = pages | {path for path in repository.PLACES if (repository.ROOT / path).exists()}
    for path in sorted(starts - pages) + repository.outside(starts):
        files.append(File.generated(config, repository.place(path), content=repository.page(path)))
        _ORIGINS[repository.place(path)] = repository.origin(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let every link lead to where the site has its file; tables are appended, sources not searched."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    if uri in _APPENDED:
        markdown += _APPENDED[uri]()
    return repository.rewritten(markdown, _ORIGINS.get(uri, f"docs/{uri}"), uri)
