"""The time of every regular expression of the source grows with its text, and not with the square of it.

By processor time of doubled texts, so that nothing depends on the machine's speed: four times the text of a
linear expression takes four times as long, of a quadratic one sixteen times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patterns import Pattern, patterns, phrases, texts

from fsdpbench.base.errors import UsageError
from fsdpbench.base.numbers import finite_number, whole_number, with_unit
from fsdpbench.base.reading import parse_json, parse_toml
from fsdpbench.base.settings import SETTINGS
from fsdpbench.reports.analysis.naming import collective_type
from fsdpbench.reports.analysis.tables import family_of
from fsdpbench.reports.readers.oom_log import read_log
from fsdpbench.sim.model.allocator.conf import AllocatorConf
from fsdpbench.sweep.hf_model import parse_shape

SIZES = (250, 1000, 4000, 16_000, 64_000)
PARTS = 20
_MEASURABLE_S = 0.02
_STEEP = 9.0
_TOO_LONG_S = 0.3


OWN = {
    "fsdpbench/sim/torch_device/strict/devices.py": "torch's own list of operators",
    "fsdpbench/base/writing.py _ASIDE": "the name of a file: 255 characters",
    "fsdpbench/script/real_ranks/host_cuda.py LIGHTNING": "names of modules, matched whole by around_imports",
}
"""Beginnings of the places of expressions for text that is not from outside."""


def growth(pattern: Pattern, name: str, make: dict[int, Any]) -> str | None:
    """What is wrong with its growth; None if nothing is."""
    before = 0.0
    for size in SIZES:
        took = min(_seconds(pattern, make[size]) for _ in range(2))
        if took > _MEASURABLE_S and before and took / before > _STEEP:
            took = min(took, *(_seconds(pattern, make[size]) for _ in range(3)))
            if took / before > _STEEP:
                return f"{name}: {before:.4f} s for a quarter of it, {took:.4f} s for {size:,} characters"
        if took > _TOO_LONG_S:
            return f"{name}: {took:.2f} s for {size:,} characters"
        before = took
    return None


def _seconds(pattern: Pattern, text: Any) -> float:
    began = time.process_time()
    pattern.use(text)
    return time.process_time() - began


def steep(each: Pattern) -> Iterator[str]:
    made: dict[str, dict[int, Any]] = {}
    for size in SIZES:
        for name, text in texts(each.pattern, size):
            made.setdefault(name, {})[size] = text
    found = (growth(each, name, by_size) for name, by_size in made.items())
    yield from (f"{each.place} {each.pattern.pattern!r:.90}: {words}" for words in found if words)


@pytest.mark.campaign
def test_places_of_our_own_text_are_there() -> None:
    places = {each.place for each in patterns()}
    assert all(any(place.startswith(own) for place in places) for own in OWN)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_expression_of_the_source_is_steep(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [each for each in patterns() if not each.place.startswith(tuple(OWN))][part::PARTS]
    failures = [found for each in asked for found in steep(each)]
    with capsys.disabled():
        print(f"\n{len(asked)} expressions tried, {len(failures)} steep texts")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["allocator", "shape", "setting"])
@pytest.mark.parametrize(
    "phrase", ["x", "a:", "1,", "[", "a=1", "expandable_segments:x", "max_split_size_mb:1"]
)
def test_an_error_does_not_repeat_a_long_text(name: str, phrase: str) -> None:
    READERS[name](phrase + "x" * 100_000)


@pytest.mark.parametrize(
    "expression",
    [r"worker \(pid[^)]*\) is killed", r"(?m)^\s*\[rank\d+\]:", r"a for\s+.+\s*$", r"ub_\w*_rs"],
)
def test_the_oracle_sees_a_steep_expression(expression: str) -> None:
    assert any(steep(Pattern("here", re.compile(expression))))


def test_the_oracle_lets_a_linear_expression_pass() -> None:
    assert not any(
        steep(Pattern("here", re.compile(r"worker \(pid[^)]{0,200}+\) is|(?<![0-9])[0-9]++ bytes")))
    )


def _quietly(read: Callable[[str], object]) -> Callable[[str], object]:
    def tried(text: str) -> object:
        try:
            return read(text)
        except (ValueError, UsageError) as error:
            words = str(error)
        assert len(words) < 1000, f"an error of {len(words):,} characters: {words:.80}"
        return None

    return tried


READERS: dict[str, Callable[[str], object]] = {
    "explain": read_log,
    "TOML": _quietly(lambda text: parse_toml(text, "here")),
    "TOML value": _quietly(lambda text: parse_toml(f'a = "{text}"', "here")),
    "JSON": _quietly(lambda text: parse_json(text, "here")),
    "kernel": collective_type.__wrapped__,
    "family": lambda name: family_of(name, False, False),
    "setting": _quietly(lambda text: SETTINGS["wrap"].parse(text)),
    "allocator": _quietly(AllocatorConf.parse),
    "shape": _quietly(parse_shape),
    "lengths": _quietly(whole_number),
    "decimal": _quietly(finite_number),
    "size": _quietly(lambda text: with_unit(text, {"gb": 10**9})),
}


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", READERS)
def test_no_reader_is_steep(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """End to end: what lies between the expressions counts too."""
    read, failures = READERS[name], []
    found = {sample for each in patterns() for sample, _ in phrases(each.pattern) if 0 < len(sample) < 60}
    for sample in sorted(found):
        before = 0.0
        for size in (6250, 25_000, 100_000):
            text = (sample * size)[:size]
            began = time.process_time()
            read(text)
            took = time.process_time() - began
            if took > 5 * _MEASURABLE_S and before and took / before > _STEEP:
                failures.append(f"{sample!r}: {before:.3f} s, then {took:.3f} s for {size:,} characters")
                break
            before = took
    with capsys.disabled():
        print(f"\n{name}: {len(found)} phrases tried, {len(failures)} steep")
    assert not failures, "\n".join(failures)
