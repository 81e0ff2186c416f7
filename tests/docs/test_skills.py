"""Every command of a skill gives what the skill says: its exit code, and the fields of its JSON."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import ROOT, TRAINING

SKILLS = sorted((ROOT / "docs" / "skills").glob("*.md"))
_SAID = re.compile(
    r"```\n(?P<command>fsdpbench [^\n]+)\n```\n\n"
    r"Exit code (?P<code>\d)\. Read (?P<fields>`[^\n]*?`)\.(?= |\n)"
)


@dataclass(frozen=True)
class Said:
    """A command of a skill, the exit code and the fields that it is said to give."""

    skill: str
    words: tuple[str, ...]
    code: int
    fields: tuple[str, ...]


def said_by(skill: Path) -> Iterator[Said]:
    for found in _SAID.finditer(skill.read_text()):
        fields = tuple(re.findall(r"`([^`]+)`", found["fields"]))
        yield Said(skill.stem, tuple(shlex.split(found["command"])), int(found["code"]), fields)


ALL = [said for skill in SKILLS for said in said_by(skill)]


def at(content: Any, path: str) -> list[Any]:
    """The values at `points[].name`: of each item where there are brackets. Raises KeyError."""
    values = [content]
    for part in path.split("."):
        values = [value[part.removesuffix("[]")] for value in values]
        if part.endswith("[]"):
            values = [item for value in values for item in value]
    return values


def test_skills_have_a_head_and_say_what_each_command_gives() -> None:
    assert [skill.stem for skill in SKILLS] == ["choose-settings", "explain-memory", "prove-program"]
    for skill in SKILLS:
        text = skill.read_text()
        name, about = re.match(r"---\nname: ([\w-]+)\ndescription: (.{40,300})\n---\n# ", text).groups()  # type: ignore[union-attr]
        assert name == skill.stem
        assert "Use " in about
        shown = len(re.findall(r"^fsdpbench ", text, re.MULTILINE))
        assert len(list(said_by(skill))) == shown >= 3
        assert len(text.split()) < 250


@pytest.mark.plain_cases("explain oom.txt")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("said", ALL, ids=lambda said: shlex.join(said.words[1:]))
def test_a_command_gives_what_the_skill_says(said: Said, tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "examples" / "oom.txt", tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, "-m", *said.words], cwd=tmp_path, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == said.code, done.stderr
    content = json.loads(done.stdout)
    for field in said.fields:
        assert at(content, field), f"{field}: there is none"


def test_a_field_that_is_not_there_is_seen() -> None:
    content = {"points": [{"name": "a"}, {"name": "b"}], "none": []}
    assert at(content, "points[].name") == ["a", "b"]
    assert at(content, "none[].name") == []
    with pytest.raises(KeyError):
        at(content, "points[].rank")


def test_the_skills_are_written_as_files(tmp_path: Path) -> None:
    from fsdpbench.cli.commands.mcp import command

    command.main(["--skills", str(tmp_path / "skills")], standalone_mode=False)
    for skill in SKILLS:
        assert (tmp_path / "skills" / skill.stem / "SKILL.md").read_text() == skill.read_text()
