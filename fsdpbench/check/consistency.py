"""The figures of one run, checked alone and beside each other.

The relations are those of `reports.result_rules`, for results and for baselines. A baseline holds fewer figures,
and a relation whose figures are not all known says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdpbench.check.figures import Figure
from fsdpbench.check.metrics import ALL
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.consistency import Contradiction, broken_rules
from fsdpbench.reports.result_figures import result_figures
from fsdpbench.sweep.repeats import first_run

_ROUNDING = 1e-9
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_METRIC_OF = {".".join(path): metric.name for metric in ALL.values() for path in metric.paths} | {
    metric.rule_name: metric.name for metric in ALL.values()
}


def checked(run: Mapping[str, object]) -> dict[str, Figure]:
    """The figures of a run by metric, each checked alone. Where there is no collective of a kind, none of its
    bytes were moved."""
    figures = {name: metric.checked(run.get(name)) for name, metric in ALL.items()}
    for kind in _KINDS:
        if figures[f"{kind}_count"] == 0 and figures[f"{kind}_bytes"] is None:
            figures[f"{kind}_bytes"] = 0
    return figures


def contradictions(device: str, figures: Mapping[str, Figure]) -> dict[str, str]:
    """What speaks against a figure beside the others of its run, by metric."""
    known = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    values: dict[str, Any] = {ALL[name].rule_name: value for name, value in known.items()}
    values["device"] = device
    if {"compute_s", "overlapped_s"} <= known.keys():
        values["time_s.compute_only"] = known["compute_s"] - known["overlapped_s"]
    if known.get("alloc_retries_per_step"):
        values["has_retries"] = 1
    return by_metric(broken_rules(values))


def by_metric(found: Iterable[Contradiction]) -> dict[str, str]:
    """The first sentence against each figure: by the metric's name, or by its own where no metric reads it."""
    sentences: dict[str, str] = {}
    for each in found:
        named = [_METRIC_OF[name] for name in each.figures if name in _METRIC_OF]
        for name in named or each.figures[:1]:
            sentences.setdefault(name, each.sentence)
    return sentences


def not_of_records(result: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return where a result differs from the records of its ranks, which it was made of; None where all of it
    that comes from them is equal, or they are not all there."""
    if result.get("status") != "ok" or not records:
        return None
    try:
        if result.get("device") != "sim" and len(records) != records[0]["world_size"]:
            return None
        own = first_run(result)
        made = result_figures(list(records), Analysis(ranks=(), configurations={}))
        made |= made.pop("peak_memory_bytes") or {}
        own |= own.get("peak_memory_bytes") or {}
        differing = [name for name, value in made.items() if not _same(value, own.get(name))]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # what is no figure is said of the result itself, and a broken record says nothing
    if not differing:
        return None
    name = differing[0]
    of = f"trace/rank*_record.json ({len(records)} of {records[0].get('world_size')} ranks)"
    return f"{name} is {own[name]} in result.json, and {made[name]} by {of}"


def _same(made: Any, own: Any) -> bool:
    if isinstance(made, list) and isinstance(own, list):
        return len(made) == len(own) and all(map(_same, made, own))
    return made is None or own is None or math.isclose(made, own, rel_tol=_ROUNDING)


def communicates(figures: Mapping[str, Figure]) -> bool:
    """Whether the run had any communication that could overlap; also where that is not known."""
    known = (*(f"{kind}_count" for kind in _KINDS), "exposed_communication_s")
    return any(figures[name] != 0 for name in known)
