"""The figures of a result, from the ranks' records (times, memory, FLOPs) and the traces' analysis.

tflops_per_gpu          = model FLOPs of a step and rank / step_time_s / 1e12
hardware_tflops_per_gpu = the same with recomputation
mfu, hfu                = those / peak of the compute dtype
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from fsdpbench.reports.analysis.figures import CollectiveFigures, communication_dict
from fsdpbench.reports.analysis.intervals import seconds
from fsdpbench.reports.analysis.model import Analysis, RankAnalysis, late_dict

Record = dict[str, Any]

_TRACED = (
    "traced_step_time_s",
    "time_s",
    "communication",
    "overlap_fraction",
    "trace_trusted",
    "trace_warnings",
    "verdict",
    "late_all_gathers",
    "work",
)


def result_figures(records: Sequence[Record], analysis: Analysis) -> dict[str, Any]:
    """All figures that `fsdpbench run --json` takes from records and traces; None for what cannot be known.

    Args:
        records: one object a rank (`rank{r}_record.json`).
        analysis: of the same ranks' traces, one configuration.

    Times are those of the slowest rank: the median of its timed steps, and its mean traced step, whose
    parts sum to it in whole nanoseconds. Memory peaks are the greatest over ranks and steps.
    """
    step_time = _step_time(records)
    first = records[0] if records else {}
    flops = first.get("flops_per_step") or {}
    tflops = _rate(flops.get("model"), step_time, 1e12)
    hardware_tflops = _rate(flops.get("hardware"), step_time, 1e12)
    peak = first.get("peak_flops")
    return {
        "step_time_s": step_time,
        "samples_per_s_per_gpu": _rate(first.get("samples_per_step"), step_time),
        "tokens_per_s_per_gpu": _rate(first.get("tokens_per_step"), step_time),
        "tflops_per_gpu": tflops,
        "hardware_tflops_per_gpu": hardware_tflops,
        "mfu": tflops * 1e12 / peak if tflops is not None and peak else None,
        "hfu": hardware_tflops * 1e12 / peak if hardware_tflops is not None and peak else None,
        **_memory(records),
        **_traced(analysis),
        "loss": _loss(records),
    }


def _step_time(records: Sequence[Record]) -> float | None:
    medians = [median(record["step_times_s"]) for record in records if record.get("step_times_s")]
    return max(medians) if medians else None


def _rate(amount: float | None, step_time: float | None, unit: float = 1.0) -> float | None:
    return None if amount is None or not step_time else amount / step_time / unit


def _memory(records: Sequence[Record]) -> dict[str, Any]:
    """Peaks; retries of a mean step, on the rank with most; out-of-memory errors, all together."""
    by_rank = [record["memory_per_step"] for record in records if record.get("memory_per_step")]
    if not by_rank:
        return {"peak_memory_bytes": None, "alloc_retries_per_step": None, "ooms": None}
    steps = [step for rank in by_rank for step in rank]
    return {
        "peak_memory_bytes": {
            kind: max((step[kind] for step in steps if step.get(kind) is not None), default=None)
            for kind in ("allocated", "active", "reserved")
        },
        "alloc_retries_per_step": max(
            sum(step["alloc_retries"] for step in rank) / len(rank) for rank in by_rank
        ),
        "ooms": sum(step["ooms"] for step in steps),
    }


def _traced(analysis: Analysis) -> dict[str, Any]:
    if not analysis.ranks:
        return dict.fromkeys(_TRACED)
    slowest = max(analysis.ranks, key=lambda rank: rank.mean_step.total)
    mean = slowest.mean_step
    return {
        "traced_step_time_s": seconds(mean.total),
        "time_s": mean.to_dict(),
        "communication": _mean_communication(slowest),
        "overlap_fraction": slowest.overlap_fraction,
        "trace_trusted": all(rank.trusted for rank in analysis.ranks),
        "trace_warnings": [f"rank {rank.rank}: {line}" for rank in analysis.ranks for line in rank.warnings],
        "verdict": slowest.verdict.to_dict() if slowest.verdict else None,
        "late_all_gathers": late_dict(slowest.gathers),
        "work": slowest.work.to_dict(max(len(slowest.steps), 1)),
    }


def _mean_communication(rank: RankAnalysis) -> dict[str, Any]:
    """Counts, bytes and times of a mean step; the bandwidth is that of all steps."""
    steps = max(len(rank.steps), 1)

    def mean(figures: CollectiveFigures) -> dict[str, float | int | None]:
        values = figures.to_dict()
        for key in ("count", "bytes", "wire_bytes", "time_s", "exposed_s"):
            value = values[key]
            if value is not None:
                # Steps are alike as a rule, and a count is then a whole number.
                values[key] = (
                    value // steps if isinstance(value, int) and value % steps == 0 else value / steps
                )
        return values

    together = communication_dict(rank.communication)
    return {name: mean(rank.communication.get(name, CollectiveFigures())) for name in together}


def _loss(records: Sequence[Record]) -> list[float] | None:
    """Mean over ranks for each step; None where a rank has no losses (shapes have no values)."""
    losses = [record.get("losses") for record in records]
    known = [each for each in losses if each is not None]
    if not known or len(known) < len(losses):
        return None
    return [sum(values) / len(values) for values in zip(*known, strict=False)]
