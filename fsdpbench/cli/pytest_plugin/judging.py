"""Judge a simulated run by bounds of its figures (budgets) and by committed figures (baselines).

A bound is a maximum, or a minimum for figures that get worse as they fall. Baselines are those of the gate,
but store what shapes a step instead of a sweep's space. Each test has its own files: workers do not conflict.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from fsdpbench.answers.check.compare import Change, Comparison, Verdict, compare
from fsdpbench.answers.check.metrics import METRICS, Unusable, checked, figure_from
from fsdpbench.answers.check.records.baseline import Baseline, check_names, require_alike, strictly
from fsdpbench.answers.check.records.sides import Side, baseline_side, flaws_of, require_common, side_of
from fsdpbench.answers.check.text import changes_text
from fsdpbench.answers.check.thresholds import Thresholds
from fsdpbench.base.errors import BenchError, UsageError, unknown
from fsdpbench.base.reading import one_line
from fsdpbench.base.result_sections import ObservedScript, Place
from fsdpbench.reports.consistency import values_of
from fsdpbench.reports.figures import FIGURES, Judged, Worse
from fsdpbench.reports.result import Result

__tracebackhide__ = True
_UPDATE = "--fsdpbench-update"
_LONGEST_NAME, _MOST_LINES = 150, 8
_FIGURES = {
    row.name: row
    for row in FIGURES
    if ("flat" in row.marks or row.judged in (Judged.YES, Judged.WITNESS)) and row.worse is not Worse.NEITHER
}
SHORT = {row.short: (name, row.scale) for name, row in _FIGURES.items() if row.short}
"""Short names: the figure, and the factor from its unit to the short name's unit."""


def _figure(name: str) -> tuple[str, float]:
    figure, scale = SHORT.get(name, (name, 1.0))
    if figure not in _FIGURES:
        raise unknown("figure", name, [*SHORT, *_FIGURES], "docs/how-to/pytest.md")
    return figure, scale


def checked_limits(given: Mapping[str, object]) -> dict[str, float]:
    """Return bounds by figure, in the figures' units. Raises `UsageError` for impossible bounds."""
    limits: dict[str, float] = {}
    for name, value in given.items():
        figure, scale = _figure(name)
        usable = figure_from(value)
        if isinstance(usable, int | float):
            usable = checked(_FIGURES[figure], usable / scale)
        if usable is None or isinstance(usable, Unusable) or figure in limits:
            why = "no number" if usable is None else getattr(usable, "why", f"{figure} has another bound")
            raise UsageError(f"{name}={value!r} can be no bound: {why}")
        limits[figure] = usable
    if not limits:
        raise UsageError("a budget without a figure checks nothing; write fsdp_budget(peak_gib=40)")
    return limits


def figure_of(result: Result, name: str) -> float:
    """Return a figure in the unit of its name; NaN if unknown. Raises `UsageError`."""
    figure, scale = _figure(name)
    value = checked(_FIGURES[figure], values_of(result.to_dict()).get(_FIGURES[figure].path))
    return value * scale if isinstance(value, int | float) else math.nan


def over_budget(name: str, result: Result, limits: Mapping[str, float]) -> str:
    """Return the figures beyond `limits`, their causes, and the lines of units and waits; "" if none is."""
    changes = []
    for figure, limit in limits.items():
        value, lower = figure_of(result, figure), _FIGURES[figure].worse is Worse.LOWER
        if math.isnan(value):
            changes.append(Change(name, figure, limit, None, Verdict.UNKNOWN, reason="is not known"))
        elif (value < limit if lower else value > limit) and not math.isclose(value, limit):
            relative = (value - limit) / limit if limit else None
            changes.append(Change(name, figure, limit, value, Verdict.WORSE, relative))
    if not changes:
        return ""
    lines = [f"  {at}: {what}: {how}" for what, (how, at) in _made_by(result).items() if at][:_MOST_LINES]
    head = f"over its budget: {len(changes)} of {len(limits)} figures; the budget, then the run:"
    text = changes_text(Comparison(tuple(changes), (), (), 1))
    return "\n".join([head, *text, *(["made by:"] if lines else []), *lines]).rstrip()


def _made_by(result: Result) -> dict[str, tuple[str, str]]:
    """Return what shapes a step: lines that create units, waits and optimizers, each with its effect and
    place (`train.py:12`); the model's units and dtypes have no place."""
    seen = result.observed or ObservedScript()
    model = seen.model
    lines: list[tuple[Place, str]] = [
        *((each, f"calls={each.count}, {_words(each.arguments)}") for each in seen.sharding),
        *((each, f"the CPU waits, {each.per_step:g} a step") for each in seen.waits),
        *((each, f"optimizer, fused={each.fused}") for each in seen.optimizers),
    ]
    found = {
        "units": (f"{model.units} ({_words(model.unit_classes)})", ""),
        "parameters": (f"{model.dtype}, computed in {seen.computes_in}", ""),
    }
    for place, how in lines:
        name = f"`{one_line(place.text)}`"
        while name in found:
            name += " again"
        found[name] = (how, place.short)
    return found


def _words(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None)


def compare_with_baseline(
    run: str, result: Result, item: pytest.Item, name: str, allow: Mapping[str, float]
) -> str:
    """Return what is worse than the baseline `name` of a test, with its cause; empty if nothing is. With
    `--fsdpbench-update` write the baseline. Raises `BenchError` for a bad `allow` or an unwritable file."""
    check_names(allow, METRICS, "check_baseline", "allow", "metric")
    thresholds = strictly({"relative_change": allow}, Thresholds, "check_baseline: allow")
    path, side = _path(item, name), side_of(item.nodeid, {run: [result.to_dict()]})
    command = f"pytest {_UPDATE} '{item.nodeid}'"
    if item.config.getoption("fsdpbench_update"):
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
    """Return the path of a test's baseline, named after its module, the test and `name`, if not empty."""
    test = item.nodeid.partition("::")[2].replace("::", ".")
    words = ".".join(filter(None, (item.path.stem, test, name)))
    plain = re.sub(r"[^\w.=-]+", "-", words, flags=re.ASCII)[:_LONGEST_NAME]
    if plain != words:  # two tests must not share a file
        plain += f"-{hashlib.sha256(words.encode()).hexdigest()[:6]}"
    return item.path.parent / "baselines" / f"{plain}.json"


def _differences(
    baseline: Baseline, path: Path, side: Side, result: Result, thresholds: Thresholds
) -> list[str]:
    """Return the gate's report, and changes in what shapes a step. Raises `BenchError`."""
    before = baseline_side(baseline, path)
    require_alike(before.surroundings, side.surroundings)
    require_common(before.entries, side.entries)
    comparison = compare(before.entries, side.entries, thresholds)
    if not comparison.regressions and not comparison.unjudged:
        return []
    lines = [f"worse than {path}; the baseline, then the run:", *changes_text(comparison)]
    old, new = baseline.space.get("made_by") or {}, _made_by(result)
    for what, (how, at) in new.items():
        if old.get(what) != how:
            change = f"{old[what]} -> {how}" if what in old else f"{how} (new)"
            lines.append(": ".join(filter(None, ("what shapes a step", at, what, change))))
    return lines + [f"what shapes a step: {what}: {old[what]} (gone)" for what in old if what not in new]


def _write(path: Path, test: str, side: Side, result: Result) -> None:
    """Write the figures for the installed torch, unless only the date would change. Raises `BenchError`."""
    if flaws := flaws_of(side):
        raise UsageError(f"no baseline can be made: {'; '.join(flaws.values())}")
    known = Baseline.read(path) if path.exists() else Baseline({}, {})
    space = {"pytest": test, "made_by": {what: how for what, (how, _) in _made_by(result).items()}}
    same_space = msgspec.structs.replace(known, space=space)
    new = same_space.updated(side.entries, side.surroundings, f"pytest {_UPDATE}", ())
    sets = [{k: (v.configurations, v.surroundings) for k, v in each.sets.items()} for each in (known, new)]
    if known.space != space or sets[0] != sets[1]:
        path.parent.mkdir(exist_ok=True)
        new.write(path)
