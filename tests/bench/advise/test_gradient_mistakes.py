"""Gradients that do not exist or are not exchanged are found, in every style of writing, and nothing is said
of a script that is right."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from .conftest import Run
from .gradient_mistakes import CASES, PARTS
from .gradient_programs import GOOD
from .styles import STYLES, script


def found(run: Run, name: str, style: str) -> None:
    """The mistake is found at its line; the diff, where there is one, mends it."""
    case = CASES[name]
    files = script(case.mistake, style)
    tried = run(files)
    named = [(each["kind"], each["cause"], case.text in each["text"]) for each in tried.findings]
    assert (case.kind, case.cause, True) in named, (named, tried.findings)
    place = next(each for each in tried.findings if each["cause"] == case.cause)
    if case.text:
        assert case.text in files[place["file"].rpartition("/")[2]].splitlines()[place["line"] - 1]
    (advice, *_) = [
        each for each in tried.candidates if not each.variation and each.kind in ("wrong", "fault")
    ]
    diff = tried.diff(advice)
    if diff is not None:
        assert not run(files, diff=diff).findings, diff


@pytest.mark.campaign
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CASES)
def test_every_mistake_is_found_in_every_style(name: str, style: str, run: Run) -> None:
    found(run, name, style)


@pytest.mark.campaign
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", [f"{name} mended" for name in CASES] + list(GOOD))
def test_nothing_is_said_of_a_script_that_is_right(name: str, style: str, run: Run) -> None:
    mended = {f"{name} mended": case.mended for name, case in CASES.items()}
    assert run(script((mended | GOOD)[name], style)).findings == []


_CLIPPED = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()"


def _drawn(number: int) -> tuple[str, str, Mapping[str, Any]]:
    """A mistake in a style, in a model of another size; gradients are clipped in every second one."""
    draw = random.Random(number)
    name = draw.choice(sorted(CASES))
    parts = dict(CASES[name].mistake)
    if "model" not in parts:
        parts["model"] = f"model = Model(layers={draw.randint(2, 6)})"
    if "step" not in parts and draw.random() < 0.5:
        parts["step"] = PARTS["step"].replace("optimizer.step()", _CLIPPED)
    return name, draw.choice(sorted(STYLES)), parts


@pytest.mark.campaign
@pytest.mark.parametrize("number", range(60))
def test_drawn_mistakes_are_found(number: int, run: Run) -> None:
    name, style, parts = _drawn(number)
    case = CASES[name]
    findings = run(script(parts, style)).findings
    assert (case.kind, case.cause) in [(each["kind"], each["cause"]) for each in findings], (
        name,
        style,
        findings,
    )
