"""Committed figures of a test's runs, a file each in the folder `baselines` beside the test module.

A file is a baseline of the gate (docs/gate.md): a set of figures for each version of torch. In place of a
sweep's space it names the test, and what shaped a step when it was written. Files are written whole, and each
by one test, so workers of pytest-xdist do not meet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fsdpbench.answers.check.compare import compare
from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import Baseline
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.answers.check.records.sides import Side, baseline_side, flaws_of, side_of
from fsdpbench.answers.check.records.strict import check_names
from fsdpbench.answers.check.records.surroundings import require_alike
from fsdpbench.answers.check.text import changes_text
from fsdpbench.answers.check.thresholds import MOST_ALLOWED, Thresholds
from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.cli.pytest_plugin.budgets import made_by

if TYPE_CHECKING:
    from fsdpbench.cli.pytest_plugin.runs import SimulatedRun

__tracebackhide__ = True
_UPDATE = "--fsdpbench-update"
_FOLDER = "baselines"
_HASH_LENGTH = 6


def compare_with_baseline(run: SimulatedRun, name: str, allow: Mapping[str, float]) -> str:
    """Return what is worse than the baseline of the test that runs, with its cause; empty if nothing is. With
    `--fsdpbench-update` write the baseline instead. Raises `UsageError` for a bad name or `allow`."""
    thresholds = _thresholds(allow)
    item = run.state.item
    path = _path(item.path, item.nodeid.partition("::")[2], name)
    side = side_of(item.nodeid, {run.name: [run.result.to_dict()]})
    command = f"pytest {_UPDATE} '{item.nodeid}'"
    if run.state.updates:
        _write(path, item.nodeid, side, run)
        return ""
    if not path.exists():
        return f"{path}: there is no baseline yet; write it, and commit it: {command}"
    try:
        baseline = Baseline.read(path)
        return _differences(baseline, path, side, thresholds, run, command)
    except BenchError as error:
        reason = str(error).partition(" Add a set with")[0]
        return f"cannot be compared: {reason}\nif the change is meant: {command}"


def _differences(
    baseline: Baseline, path: Path, side: Side, thresholds: Thresholds, run: SimulatedRun, command: str
) -> str:
    """Return the gate's words on a run against its baseline; empty if nothing is worse. Raises
    `BenchError`."""
    before = baseline_side(baseline, path)
    require_alike(before.surroundings, side.surroundings)
    if before.entries.keys() != side.entries.keys():
        raise UsageError(f"{path} is of {', '.join(before.entries)}, and this run of {run.name}")
    comparison = compare(before.entries, side.entries, thresholds)
    if not comparison.regressions and not comparison.unjudged:
        return ""
    changed = _changed(baseline.space, run)
    return "\n".join(
        [
            f"worse than {path}; the baseline, then the run:",
            *changes_text(comparison),
            "what shapes a step has changed:" if changed else "no line that makes units or waits has changed",
            *(f"  {line}" for line in changed),
            f"if the change is meant: {command}",
        ]
    )


def _changed(space: Mapping[str, object], run: SimulatedRun) -> list[str]:
    """Return what makes units and waits now and did not, did and does not, or does it in another way."""
    try:
        old = msgspec.convert(space.get("script"), dict[str, str])
    except msgspec.ValidationError:
        return []
    new = made_by(run.result)
    lines = []
    for what, (how, place) in new.items():
        at = f"{place}: " if place else ""
        if what not in old:
            lines.append(f"{at}{what}: {how} (new)")
        elif old[what] != how:
            lines.append(f"{at}{what}: {old[what]} -> {how}")
    return lines + [f"{what}: {how} (gone)" for what, how in old.items() if what not in new]


def _write(path: Path, test: str, side: Side, run: SimulatedRun) -> None:
    """Write the figures as the set of the torch at hand, unless they are there already. Raises
    `BenchError`."""
    if flaws := flaws_of(side):
        raise UsageError(f"no baseline can be made of {run.name}: {'; '.join(flaws.values())}")
    known = Baseline.read(path) if path.exists() else Baseline({}, {})
    space = {"pytest": test, "script": {what: how for what, (how, _) in made_by(run.result).items()}}
    updated = known.updated(space, side.entries, side.surroundings, f"pytest {_UPDATE}", ())
    if known.space == space and _figures(known) == _figures(updated):
        return  # only its date would change
    path.parent.mkdir(exist_ok=True)
    updated.write(path)


def _figures(baseline: Baseline) -> dict[str, tuple[dict[str, Entry], dict[str, str]]]:
    return {torch: (figures.entries(), figures.surroundings) for torch, figures in baseline.sets.items()}


def _path(module: Path, test: str, name: str) -> Path:
    """Return the file of a test's baseline: the names of module and test, and `name` if one is given."""
    if not isinstance(name, str):
        raise UsageError(f"check_baseline(name={name!r}): a name is a text")
    words = ".".join([module.stem, test.replace("::", "."), *([name] if name else [])])
    plain = re.sub(r"[^\w.=-]+", "-", words, flags=re.ASCII)[:150]
    if plain != words:  # two tests must not share a file
        plain += f"-{hashlib.sha256(words.encode()).hexdigest()[:_HASH_LENGTH]}"
    return module.parent / _FOLDER / f"{plain}.json"


def _thresholds(allow: Mapping[str, float]) -> Thresholds:
    check_names(allow, METRICS, "check_baseline", "allow", "metric")
    for figure, share in allow.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= MOST_ALLOWED:
            raise UsageError(
                f"check_baseline: allow {figure}={share!r}: a share from 0 to 1 (0.01: one per cent)"
            )
    return Thresholds(relative_change=dict(allow))
