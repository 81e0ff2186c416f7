"""The repository's files on the site: where each is there, and links between pages that fit.

Pages are written for the repository, where a link leads to a file. On the site README is the first page,
other pages outside `docs` have a place of their own, and a source file or a folder that a page links to is
shown on a page under `source/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    ".github/SECURITY.md": "security.md",
    ".github/CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
    ".sh": "bash",
    ".json": "json",
    ".txt": "text",
}
_COPIED = {".png", ".svg", ".json", ".html"}
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Where the site has the repository's file or folder `path`."""
    if path in PLACES:
        return PLACES[path]
    file = ROOT / path
    if path.startswith("docs/") and file.is_file() and file.suffix in {".md", *_COPIED}:
        return path.removeprefix("docs/")
    if file.is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}" if file.suffix == ".md" else f"source/{path}.md"


def links(text: str, origin: str) -> set[str]:
    """The files and folders of the repository that the page at `origin` links to."""
    found = {_target(match[2], origin) for match in _LINK.finditer(_CODE.sub("", text))}
    return {path for path in found if path is not None}


def rewritten(text: str, origin: str, uri: str) -> str:
    """`text` of the page at `origin`, which is at `uri` on the site, with links that work there."""
    here = posixpath.dirname(uri)

    def moved(match: re.Match[str]) -> str:
        path = _target(match[2], origin)
        if path is None:
            return match[0]
        return f"{match[1]}({posixpath.relpath(place(path), here or '.')}{match[3] or ''})"

    pieces, start = [], 0
    for code in _CODE.finditer(text):
        # A link's words may be code: only blocks, and code outside of a link, stay as they are.
        if code[0].startswith("```"):
            pieces += [_LINK.sub(moved, text[start : code.start()]), code[0]]
            start = code.end()
    return "".join([*pieces, _LINK.sub(moved, text[start:])])


def _target(link: str, origin: str) -> str | None:
    if "://" in link or link.startswith("mailto:"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return path if (ROOT / path).exists() else None


def page(path: str) -> str:
    """The Markdown of the page that shows `path`: a page, a source file as code, or a folder as a list."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        readme = file / "README.md"
        names = sorted(each.name for each in file.iterdir() if each.is_file())
        listed = "\n".join(f"- [{name}]({name})" for name in names if (file / name).suffix in _LANGUAGES)
        about = f"What is in it: [README]({readme.name}).\n\n" if readme.exists() else ""
        return f"# {path}\n\n{about}{listed}\n"
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n"


def origin(path: str) -> str:
    """Return the path that links of the page showing `path` are relative to."""
    return f"{path}/index.md" if (ROOT / path).is_dir() else path


def outside(starts: set[str]) -> list[str]:
    """All files and folders outside `docs` that the pages `starts` lead to, directly or by others."""
    waiting, seen = sorted(starts), set(starts)
    while waiting:
        path = waiting.pop()
        if (ROOT / path).suffix != ".md" and not (ROOT / path).is_dir():
            continue
        new = links(page(path), origin(path)) - seen
        seen |= new
        waiting += sorted(new)
    return sorted(path for path in seen if place(path).startswith("source/"))
