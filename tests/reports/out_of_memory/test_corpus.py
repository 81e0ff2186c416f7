"""Messages as people paste them, each beside its answer: read right, or said to be unknown."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.base.numbers import with_unit
from fsdpbench.reports.analysis.out_of_memory import describe_report
from fsdpbench.reports.readers.oom_log import read_log

CORPUS = Path(__file__).parent / "data" / "messages.txt"
UNITS = {"bytes": 1}
UNITS |= {f"{letter}{b}": 1 << 10 * power for power, letter in enumerate("kmgtp", 1) for b in ("ib", "b")}


@dataclass(frozen=True)
class Case:
    """A pasted text; answer: figures as sizes, phase, line, ranks, words that have to be said, or never."""

    name: str
    answer: dict[str, Any]
    text: str


def _cases() -> list[Case]:
    sections = re.split(r"^=== ", CORPUS.read_text(), flags=re.MULTILINE)[1:]
    found = []
    for section in sections:
        name, rest = section.split("\n", 1)
        answer, text = rest.split("---\n", 1)
        lines = [line.replace(" = null", ' = "unknown"') for line in answer.splitlines()]
        found.append(Case(name, tomllib.loads("\n".join(lines)), text))
    return found


def _size(value: Any) -> int | None:
    if value == "unknown":
        return None
    return value if isinstance(value, int) else with_unit(value, UNITS)


CASES = _cases()


def test_the_corpus_is_large() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_pasted_text_is_read_right_or_said_to_be_unknown(case: Case) -> None:
    answer = dict(case.answer)
    report = read_log(case.text)
    if answer.pop("none", False):
        assert report is None
        return
    assert report is not None
    said = describe_report(report)
    for words in answer.pop("says", []):
        assert words in said, said
    for words in answer.pop("never", []):
        assert words not in said, said
    assert report.message.source == answer.pop("source")
    assert (report.phase or "unknown") == answer.pop("phase", report.phase or "unknown")
    assert str(report.where) == answer.pop("line", str(report.where))
    assert list(report.ranks) == answer.pop("ranks", [])
    figures = report.message.to_dict()
    assert {name: figures[name] for name in answer} == {name: _size(value) for name, value in answer.items()}
