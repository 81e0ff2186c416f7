"""What HTA says about a trace, in a few lines; what it cannot do with a trace is reported and left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdpbench.reports.hta_check import (
    hta_critical_path,
    hta_idle_causes,
    hta_overlap,
    hta_queue_length,
    hta_trace_diff,
)
from fsdpbench.reports.outside_text import printable

_MOST_NAMES = 8


def hta_opinion(trace: Path) -> dict[str, Any]:
    """Its overlap, the first step's critical path (s), idle causes (s) and mean queue length by stream; of a
    figure that it cannot find, the reason as text."""
    return {
        "trace": str(trace),
        "overlap_fraction": _tried(lambda: hta_overlap({0: trace})[0]),
        "critical_path_s": _tried(lambda: hta_critical_path(trace, 0)),
        "idle_causes_s": _tried(lambda: hta_idle_causes(trace)),
        "queue_length": _tried(lambda: hta_queue_length(trace)),
    }


def hta_changes(before: Path, after: Path) -> dict[str, Any]:
    """Its trace diff: kernels whose count or time changed, most first; or the reason why there is none."""
    found = _tried(lambda: hta_trace_diff(before, after))
    if isinstance(found, str):
        return {"kernels": found}
    changed = {name: row for name, row in found.items() if row[0] != row[1] or row[2] != row[3]}
    ordered = sorted(changed, key=lambda name: -abs(changed[name][3] - changed[name][2]))
    keys = ("count_before", "count_after", "time_before_s", "time_after_s")
    return {"kernels": {name: dict(zip(keys, changed[name], strict=True)) for name in ordered}}


def describe_opinion(opinion: Mapping[str, Any]) -> str:
    """`hta_opinion` for a terminal."""
    overlap = opinion["overlap_fraction"]
    lines = [
        f"HolisticTraceAnalysis on {opinion['trace']}",
        f"  overlap             {overlap if isinstance(overlap, str) else f'{100 * overlap:.2f} %'}",
        f"  critical path       {_times(opinion['critical_path_s'])}",
    ]
    for words, key, told in (
        ("idle, stream", "idle_causes_s", _times),
        ("queue, stream", "queue_length", lambda mean: f"{mean:.1f} kernels wait on average"),
    ):
        found = opinion[key]
        if isinstance(found, str):
            lines.append(f"  {words:<20}{found}")
        else:
            lines += [f"  {f'{words} {stream}':<20}{told(each)}" for stream, each in sorted(found.items())]
    return "\n".join(printable(line) for line in lines)


def describe_changes(changes: Mapping[str, Any]) -> str:
    """`hta_changes` for a terminal."""
    kernels = changes["kernels"]
    if isinstance(kernels, str):
        return f"HolisticTraceAnalysis, trace diff: {kernels}"
    lines = ["HolisticTraceAnalysis, trace diff: change of time, count before and after (all steps)"]
    for name in list(kernels)[:_MOST_NAMES]:
        row = kernels[name]
        change = 1e3 * (row["time_after_s"] - row["time_before_s"])
        lines.append(f"  {change:+12.3f} ms  {row['count_before']:g} -> {row['count_after']:g}  {name[:90]}")
    return "\n".join(printable(line) for line in lines)


def _tried(question: Callable[[], Any]) -> Any:
    """HTA's answer, or its error as a line: it fails in many ways on traces that lack what it expects."""
    from fsdpbench.reports.hta_check import HtaMissingError

    try:
        return question()
    except HtaMissingError:
        raise
    except Exception as error:
        return f"not found ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"


def _times(found: Any) -> str:
    if isinstance(found, str):
        return found
    return (
        ", ".join(f"{name.replace('_', ' ')} {1e3 * time:.3f} ms" for name, time in found.items()) or "none"
    )
