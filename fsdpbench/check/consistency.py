"""The figures of one run, checked alone, beside each other, and beside the records that they were made of.

A baseline holds fewer figures than a result: a relation whose figures are not all known says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdpbench.check.figures import Figure
from fsdpbench.check.metrics import ALL
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.consistency import Contradiction, broken_rules, leaves, with_sums
from fsdpbench.reports.result_figures import result_figures
from fsdpbench.sweep.repeats import first_run

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_METRIC_OF = {metric.rule_name: metric.name for metric in ALL.values()} | {
    "time_s.compute_only": "compute_s",
    "measured.step_times_s": "fastest_step_s",
    "late_all_gathers.late": "late_all_gathers",
    "late_all_gathers.prefetched": "prefetched_all_gathers",
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
    values |= {"device": device, "has_retries": known.get("alloc_retries_per_step")}
    return by_metric(broken_rules(with_sums(values)))


def by_metric(found: Iterable[Contradiction]) -> dict[str, str]:
    """The first sentence against each figure, by metric, or by its own name where no metric reads it."""
    sentences: dict[str, str] = {}
    for each in found:
        named = [_METRIC_OF[name] for name in each.figures if name in _METRIC_OF]
        for name in named or each.figures[:1]:
            sentences.setdefault(name, each.sentence)
    return sentences


def not_of_records(result: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> str | None:
    """Return where a result differs from the records of its ranks, which it was made of; None where all that
    comes from them is equal, or they are not all there."""
    try:
        if result["status"] != "ok" or len(records) < (result["device"] == "sim" or records[0]["world_size"]):
            return None
        own = dict(leaves(first_run(result)))
        made = dict(leaves(result_figures(records, Analysis(ranks=(), configurations={}))))
        for name in made.keys() & own.keys():
            if not _same(made[name], own[name]):
                told = f"{name} is {own[name]} in result.json, and {made[name]} by trace/rank*_record.json"
                return f"{told} ({len(records)} of {records[0]['world_size']} ranks)"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass  # what is no figure is said of the result itself, and a broken record says nothing
    return None


def _same(made: Any, own: Any) -> bool:
    if isinstance(made, list) and isinstance(own, list):
        return len(made) == len(own) and all(map(_same, made, own))
    return made is own or math.isclose(made, own, rel_tol=1e-9)


def communicates(figures: Mapping[str, Figure]) -> bool:
    """Whether the run had any communication that could overlap; also where that is not known."""
    known = (*(f"{kind}_count" for kind in _KINDS), "exposed_communication_s")
    return any(figures[name] != 0 for name in known)
