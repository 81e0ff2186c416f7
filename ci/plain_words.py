"""Plain words: finds phrasings that readers stumble over, in what people read.

    python ci/plain_words.py [PATH ...]      Markdown, page templates, and every text in the packages' sources

`plain_words.toml` lists each phrasing with what to write instead. Code in Markdown and comments are skipped.
To keep a listed word, write "plain-words: keep" on its line or on the line before.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
_CODE = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|`[^`\n]*`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL
)
_TEMPLATE = re.compile(r"\{[{%#].*?[}%#]\}", re.DOTALL)
_KEEP = "plain-words: keep"


@dataclass(frozen=True)
class Phrasing:
    """What not to write: a regular expression, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


@dataclass(frozen=True)
class Finding:
    """A phrasing in a text, with its line counted from 1."""

    path: str
    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}: {self.instead}"


def phrasings(path: Path = LIST) -> list[Phrasing]:
    """The list. Raises `ValueError` for an entry without a pattern or without what to write instead."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["phrasing"]
    for row in rows:
        if row.keys() != {"words", "instead"} or not all(row.values()):
            raise ValueError(f"{path}: {row}: an entry has `words`, a regular expression, and `instead`")
    return [Phrasing(re.compile(rf"\b(?:{row['words']})\b", re.IGNORECASE), row["instead"]) for row in rows]


def read_by_people() -> list[Path]:
    """Files of the repository whose words people read; of the changelog, what is new, see `texts`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    folders = ("docs/", "fsdpbench/", "impl/", "reports/", "workloads/", "ci/", ".github/")
    kinds = (".md", ".py", ".jinja", ".html")
    chosen = [
        name for name in listed if ("/" not in name or name.startswith(folders)) and name.endswith(kinds)
    ]
    return [ROOT / name for name in chosen if not name.startswith("ci/measured/") and (ROOT / name).exists()]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of all that people read in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _strings(source)
    elif path.name == "CHANGELOG.md":
        yield 1, _prose(source.split("\n## ", 2)[0] + "\n## " + source.split("\n## ", 2)[1])
    elif path.suffix == ".md":
        yield 1, _prose(source)
    else:
        yield 1, _TEMPLATE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), source)


def _prose(source: str) -> str:
    """Markdown without its code; lines stay where they are."""
    return _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), source)


def _strings(source: str) -> Iterator[tuple[int, str]]:
    """Texts of several words: docstrings, messages, helps."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), node.value)


def findings(path: Path, listed: list[Phrasing]) -> list[Finding]:
    """What of the list is in a file, in the order of its lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for first, text in texts(path):
        for phrasing in listed:
            for match in phrasing.pattern.finditer(text):
                line = first + text.count("\n", 0, match.start())
                if not any(_KEEP in near for near in lines[max(0, line - 2) : line]):
                    words = " ".join(match[0].split())
                    found.append(Finding(_shown(path), line, words, phrasing.instead))
    return sorted(found, key=lambda finding: finding.line)


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def main(arguments: list[str]) -> int:
    """Print what is found; 1 if anything is."""
    listed = phrasings()
    paths = [Path(name).resolve() for name in arguments] or read_by_people()
    found = [finding for path in paths for finding in findings(path, listed)]
    for finding in found:
        print(finding)
    print(f"{len(found)} phrasings to replace in {len(paths)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
