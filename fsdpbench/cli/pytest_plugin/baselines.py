"""Committed figures of a test's runs, a file each in the folder `baselines` beside the test module.

A file is a baseline of the gate (docs/gate.md) with a set of figures for each version of torch. In place of a
sweep's space it holds the test's name, and what shaped a step. Each test writes files of its own, whole, so
workers of pytest-xdist do not meet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from fsdpbench.answers.check.compare import compare
from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import Baseline
from fsdpbench.answers.check.records.sides import Side, baseline_side, flaws_of, require_common, side_of
from fsdpbench.answers.check.records.strict import check_names, strictly
from fsdpbench.answers.check.records.surroundings import require_alike
from fsdpbench.answers.check.text import changes_text
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.cli.pytest_plugin.budgets import made_by
from fsdpbench.reports.result import Result

__tracebackhide__ = True
_UPDATE = "--fsdpbench-update"
_LONGEST_NAME, _HASH_LENGTH = 150, 6


def compare_with_baseline(
    run: str, result: Result, item: pytest.Item, name: str, allow: Mapping[str, float], updates: bool
) -> str:
    """Return what is worse than the baseline `name` of a test, with its cause; empty if nothing is. With
    `updates` write it. Raises `UsageError` for a bad `allow`, `BenchError` for a file that cannot be written.
    """
    check_names(allow, METRICS, "check_baseline", "allow", "metric")
    thresholds = strictly({"relative_change": allow}, Thresholds, "check_baseline: allow")
    path, side = _path(item, name), side_of(item.nodeid, {run: [result.to_dict()]})
    command = f"pytest {_UPDATE} '{item.nodeid}'"
    if updates:
        _write(path, item.nodeid, side, result)
        return ""
    if not path.exists():
        return f"{path}: there is no baseline yet; write it, and commit it: {command}"
    try:
        lines = _differences(Baseline.read(path), path, side, result, thresholds)
    except BenchError as error:
        lines = [f"cannot be compared: {str(error).partition(' Add a set with')[0]}"]
    return "\n".join([*lines, f"if the change is meant: {command}"]) if lines else ""


def _path(item: pytest.Item, name: str) -> Path:
    """Return the file of a test's baseline, named by its module, itself, and `name` if that is not empty."""
    test = item.nodeid.partition("::")[2].replace("::", ".")
    words = ".".join([item.path.stem, test, *([name] if name else [])])
    plain = re.sub(r"[^\w.=-]+", "-", words, flags=re.ASCII)[:_LONGEST_NAME]
    if plain != words:  # two tests must not share a file
        plain += f"-{hashlib.sha256(words.encode()).hexdigest()[:_HASH_LENGTH]}"
    return item.path.parent / "baselines" / f"{plain}.json"


def _differences(
    baseline: Baseline, path: Path, side: Side, result: Result, thresholds: Thresholds
) -> list[str]:
    """Return the gate's words on a run and its baseline, none if nothing is worse. Raises `BenchError`."""
    before = baseline_side(baseline, path)
    require_alike(before.surroundings, side.surroundings)
    require_common(before.entries, side.entries)
    comparison = compare(before.entries, side.entries, thresholds)
    if not comparison.regressions and not comparison.unjudged:
        return []
    lines = [f"worse than {path}; the baseline, then the run:", *changes_text(comparison)]
    if changed := _changed(baseline.space, result):
        lines += ["what shapes a step has changed:", *(f"  {line}" for line in changed)]
    return lines


def _changed(space: Mapping[str, object], result: Result) -> list[str]:
    """Return what makes units and waits now and did not, did and does not, or does it in another way."""
    try:
        old = msgspec.convert(space.get("made_by"), dict[str, str])
    except msgspec.ValidationError:
        return []
    new = made_by(result)
    lines = []
    for what, (how, at) in new.items():
        if old.get(what) != how:
            before = f"{old[what]} -> {how}" if what in old else f"{how} (new)"
            lines.append(": ".join(filter(None, (at, what, before))))
    return lines + [f"{what}: {how} (gone)" for what, how in old.items() if what not in new]


def _write(path: Path, test: str, side: Side, result: Result) -> None:
    """Write the figures as the set of the torch at hand, unless only their date would change. Raises
    `BenchError`."""
    if flaws := flaws_of(side):
        raise UsageError(f"no baseline can be made: {'; '.join(flaws.values())}")
    known = Baseline.read(path) if path.exists() else Baseline({}, {})
    space = {"pytest": test, "made_by": {what: how for what, (how, _) in made_by(result).items()}}
    new = known.updated(space, side.entries, side.surroundings, f"pytest {_UPDATE}", ())
    sets = [{k: (v.configurations, v.surroundings) for k, v in each.sets.items()} for each in (known, new)]
    if known.space != space or sets[0] != sets[1]:
        path.parent.mkdir(exist_ok=True)
        new.write(path)
