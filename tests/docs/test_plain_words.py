"""The check of plain words: what it finds, where it looks, and what it leaves alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import plain_words  # noqa: E402

PHRASINGS = plain_words.phrasings()


def found(path: Path, text: str) -> list[tuple[int, str]]:
    path.write_text(text)
    return [(finding.line, finding.words) for finding in plain_words.findings(path, PHRASINGS)]


def test_markdown_is_read_without_its_code(tmp_path: Path) -> None:
    text = "It goes on.\n\n```\nit goes on\n```\nand `goes on` so\nit goes\non.\n"
    assert found(tmp_path / "a.md", text) == [(1, "goes on"), (7, "goes on")]


def test_texts_of_sources_are_read_and_names_and_comments_are_not(tmp_path: Path) -> None:
    text = '"""One.\n\nIt hangs on x.\n"""\n# hangs on\nraise ValueError(f"{x} is no number, not {y}")\n'
    assert found(tmp_path / "a.py", text) == [(3, "hangs on"), (6, "is no number")]


def test_templates_are_read_without_their_expressions(tmp_path: Path) -> None:
    assert found(tmp_path / "a.jinja", "{% if x is none %}\n<p>Told at once</p>") == [(2, "at once")]


def test_a_word_that_is_needed_can_be_kept(tmp_path: Path) -> None:
    assert found(tmp_path / "a.md", "It goes on. <!-- plain-words: keep -->\n") == []


@pytest.mark.parametrize("said", ["that nobody measured", "told at once", "in turns", "the links' roof"])
def test_what_readers_complained_of_is_found(said: str, tmp_path: Path) -> None:
    assert found(tmp_path / "a.md", f"Something {said}.\n")


def test_an_entry_without_a_replacement_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text('[[phrasing]]\nwords = "x"\ninstead = ""\n')
    with pytest.raises(ValueError, match="instead"):
        plain_words.phrasings(tmp_path / "list.toml")


def test_kinds_of_dialect_are_found(tmp_path: Path) -> None:
    kinds = plain_words.phrasings(table="kind")
    page, source = tmp_path / "a.md", tmp_path / "a.py"
    page.write_text("The first so many blocks, told from the rest.\n")
    source.write_text('def f():\n    """What is told."""\n\n\ndef g():\n    """Return what is known."""\n')
    assert [finding.words for finding in plain_words.kinds_in(page, kinds)] == ["told", "first so many"]
    assert [finding.words for finding in plain_words.kinds_in(source, kinds)] == ["told", "What"]
