"""Plain words: finds phrasings that readers stumble over, in what people read.

    python ci/plain_words.py [PATH ...]      Markdown, page templates, and every text in the packages' sources

`plain_words.toml` lists each phrasing with its replacement. Code in Markdown and comments are skipped.
To keep a listed word, write "plain-words: keep" on its line or on the line before.

A `kind` of dialect is refused in pages; in sources it is counted, with docstrings that begin with neither a
verb nor a noun. That count may only fall: lower `most_in_sources` when it has.

    python ci/plain_words.py --kinds [PATH ...]    lists them, in sources too
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
_BEGINNING = re.compile(r"(?:What|Of|Those|The same|How many|Until now|The other way round)\b")
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


def phrasings(path: Path = LIST, table: str = "phrasing") -> list[Phrasing]:
    """Return the phrasings of a table of the list.

    Raises `ValueError` for an entry without a pattern or without a replacement.
    """
    rows = tomllib.loads(path.read_text(encoding="utf-8")).get(table, [])
    for row in rows:
        if row.keys() != {"words", "instead"} or not all(row.values()):
            raise ValueError(f"{path}: {row}: an entry has `words`, a regular expression, and `instead`")
    return [Phrasing(re.compile(rf"\b(?:{row['words']})\b", re.IGNORECASE), row["instead"]) for row in rows]


def read_by_people() -> list[Path]:
    """Return the files of the repository whose words people read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    folders = ("docs/", "fsdpbench/", "impl/", "reports/", "workloads/", "ci/", ".github/")
    kinds = (".md", ".py", ".jinja", ".html", "/options.csv")
    chosen = [
        name for name in listed if ("/" not in name or name.startswith(folders)) and name.endswith(kinds)
    ]
    return [ROOT / name for name in chosen if not name.startswith("ci/measured/") and (ROOT / name).exists()]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of all that people read in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _strings(source)
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
    """Return the listed phrasings in a file, in the order of its lines."""
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


def beginnings(path: Path) -> list[Finding]:
    """Return the docstrings of a source file that begin with neither a verb nor a noun."""
    instead = "begin with a verb ('Return ...', 'Raise ...'), or with a noun phrase for a class or module"
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        Finding(_shown(path), node.body[0].lineno, match[0], instead)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented) and (match := _BEGINNING.match(ast.get_docstring(node) or ""))
    ]
    return sorted(found, key=lambda finding: finding.line)


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def kinds_in(path: Path, kinds: list[Phrasing]) -> list[Finding]:
    """Return the kinds of dialect in a file."""
    return findings(path, kinds) + (beginnings(path) if path.suffix == ".py" else [])


def _is_written(path: Path) -> bool:
    """Return whether the file is a page that is not made from docstrings."""
    return path.suffix == ".md" and not path.read_text(encoding="utf-8").startswith("<!-- Made by")


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there are any, or if sources have more kinds of dialect than before."""
    listed, kinds = phrasings(), phrasings(table="kind")
    names = [name for name in arguments if name != "--kinds"]
    paths = [Path(name).resolve() for name in names] or read_by_people()
    found = [finding for path in paths for finding in findings(path, listed)]
    pages = [finding for path in paths if _is_written(path) for finding in kinds_in(path, kinds)]
    sources = [finding for path in paths if path.suffix == ".py" for finding in kinds_in(path, kinds)]
    for finding in found + pages + (sources if "--kinds" in arguments else []):
        print(finding)
    most = tomllib.loads(LIST.read_text(encoding="utf-8"))["most_in_sources"]
    print(f"{len(found) + len(pages)} phrasings to replace in {len(paths)} files")
    print(f"{len(sources)} kinds of dialect in sources, at most {most}: --kinds lists them")
    return 1 if found or pages or len(sources) > most else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
