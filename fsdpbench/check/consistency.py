"""The figures of one run, checked alone, beside each other, and beside the records that they were made of.

A baseline holds fewer figures than a result: a relation whose figures are not all known says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdpbench.check.metrics import ALL, Figure, checked
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.consistency import Contradiction, broken_rules, with_sums
from fsdpbench.reports.figures import computed

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_METRIC_OF = {row.path: name for name, row in ALL.items()} | {
    "time_s.compute_only": "compute_s",
    "measured.step_times_s": "fastest_step_s",
    "late_all_gathers.late": "late_all_gathers",
    "late_all_gathers.prefetched": "prefetched_all_gathers",
}


def checked_run(run: Mapping[str, object]) -> dict[str, Figure]:
    """The figures of a run by metric, each checked alone. Where there is no collective of a kind, none of its
    bytes were moved."""
    figures = {name: checked(row, run.get(name)) for name, row in ALL.items()}
    for kind in _KINDS:
        if figures[f"{kind}_count"] == 0 and figures[f"{kind}_bytes"] is None:
            figures[f"{kind}_bytes"] = 0
    return figures


def contradictions(device: str, figures: Mapping[str, Figure]) -> dict[str, str]:
    """What speaks against a figure beside the others of its run, by metric."""
    known = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    values: dict[str, Any] = {ALL[name].path: value for name, value in known.items()}
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


def with_records(result: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
    """`result`, and under `records` the figures that it was made of, where no rank's record is missing."""
    try:
        if len(records) >= (result["device"] == "sim" or records[0]["world_size"]):
            return {**result, "records": computed(records, Analysis(ranks=(), configurations={}))}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass  # a broken record says nothing
    return result


def communicates(figures: Mapping[str, Figure]) -> bool:
    """Whether the run had any communication that could overlap; also where that is not known."""
    known = (*(f"{kind}_count" for kind in _KINDS), "exposed_communication_s")
    return any(figures[name] != 0 for name in known)
