"""Bounds of a run's figures: names, values that can be, and what a run over its budget says.

Any figure of `reports/figures.csv` may be bounded by its own name and in its own unit, or by a short name.
Most bounds are the most that is allowed; those of figures that get worse as they fall are the least.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from fsdpbench.answers.check.compare import Change, Comparison, Verdict
from fsdpbench.answers.check.metrics import Unusable, checked, figure_from
from fsdpbench.answers.check.text import changes_text
from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.reading import one_line
from fsdpbench.reports.consistency import values_of
from fsdpbench.reports.figures import FIGURES, Judged, Worse
from fsdpbench.reports.result import Result

__tracebackhide__ = True
SHORT = {
    "step_ms": ("step_time_s", 1e3),
    "peak_gib": ("peak_reserved_bytes", 2.0**-30),
    "allocated_gib": ("peak_allocated_bytes", 2.0**-30),
    "all_gathers": ("all_gather_count", 1),
    "reduce_scatters": ("reduce_scatter_count", 1),
    "all_reduces": ("all_reduce_count", 1),
    "copies": ("copies", 1),
    "kernels": ("kernels", 1),
    "retries": ("alloc_retries_per_step", 1),
    "exposed_ms": ("exposed_communication_s", 1e3),
    "overlap": ("overlap_fraction", 1),
}
"""Short names: the figure, and how many of its units make one of the short name's."""
_FIGURES = {
    row.name: row
    for row in FIGURES
    if ("flat" in row.marks or row.judged in (Judged.YES, Judged.WITNESS)) and row.worse is not Worse.NEITHER
}
_ROUNDING = 1e-9
_MOST_LINES = 8


def _figure(name: str) -> tuple[str, float]:
    """Return the figure that a name means and the factor of its unit. Raises `UsageError`."""
    figure, factor = SHORT.get(name, (name, 1))
    if figure not in _FIGURES:
        raise unknown("figure", name, [*SHORT, *_FIGURES], "docs/how-to/pytest.md")
    return figure, factor


def checked_limits(given: Mapping[str, object]) -> dict[str, float]:
    """Return bounds by figure, in the figures' units. Raises `UsageError` for an unknown name, a value that
    no run can have, and for none at all."""
    if not given:
        raise UsageError("a budget without a figure checks nothing; write fsdp_budget(peak_gib=40)")
    limits: dict[str, float] = {}
    for name, value in given.items():
        figure, factor = _figure(name)
        usable = figure_from(value)
        if isinstance(usable, int | float):
            usable = checked(_FIGURES[figure], usable / factor)
        if usable is None or isinstance(usable, Unusable):
            raise UsageError(f"{name}={value!r} can be no bound: {usable.why if usable else 'no number'}")
        if figure in limits:
            raise UsageError(f"{name}={value!r} bounds {figure} a second time")
        limits[figure] = usable
    return limits


def figure_of(result: Result, name: str) -> float:
    """Return a figure in the unit of its name; NaN: not known. Raises `UsageError`."""
    figure, factor = _figure(name)
    value = checked(_FIGURES[figure], values_of(result.to_dict()).get(_FIGURES[figure].path))
    return value * factor if isinstance(value, int | float) else math.nan


def over_budget(name: str, result: Result, limits: Mapping[str, float]) -> str:
    """Return the figures beyond `limits`, with causes as the gate says them and the lines that make units and
    waits; empty if there are none."""
    changes = tuple(change for each in limits.items() if (change := _exceeded(name, result, *each)))
    if not changes:
        return ""
    lines = [f"  {at}: {what}: {how}" for what, (how, at) in made_by(result).items() if at]
    head = f"over its budget: {len(changes)} of {len(limits)} figures; the budget, then the run:"
    text = changes_text(Comparison(changes, (), (), 1))
    return "\n".join([head, *text, *["made by"][: len(lines)], *lines[:_MOST_LINES]]).rstrip()


def _exceeded(name: str, result: Result, figure: str, limit: float) -> Change | None:
    value = figure_of(result, figure)
    if math.isnan(value):
        return Change(name, figure, limit, None, Verdict.UNKNOWN, reason="is not known of this run")
    over = value < limit if _FIGURES[figure].worse is Worse.LOWER else value > limit
    if not over or math.isclose(value, limit, rel_tol=_ROUNDING):
        return None
    return Change(name, figure, limit, value, Verdict.WORSE, (value - limit) / limit if limit else None)


def made_by(result: Result) -> dict[str, tuple[str, str]]:
    """Return what shapes a step, as the run observed it: lines that make units, waits and optimizers, with
    how they do and their place (`train.py:12`), and the model's units and dtypes, which have none."""
    observed = result.stored("script.observed") or {}
    model = observed.get("model") or {}
    kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "sharding": lambda each: f"calls={each['count']}, {_words(each['arguments'])}",
        "waits": lambda each: f"the CPU waits, {each['per_step']:g} a step",
        "optimizers": lambda each: f"optimizer, fused={each['fused']}",
    }
    lines = ((each, how(each)) for kind, how in kinds.items() for each in observed.get(kind) or [])
    found = {
        "units": (f"{model.get('units')} ({_words(model.get('unit_classes') or {})})", ""),
        "parameters": (f"{model.get('dtype')}, computed in {observed.get('computes_in')}", ""),
    }
    for each, how in lines:
        name = f"`{one_line(each['text'])}`"
        while name in found:
            name += " again"
        found[name] = (how, f"{str(each['file']).rpartition('/')[2]}:{each['line']}")
    return found


def _words(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None)
