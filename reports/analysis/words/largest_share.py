"""The largest share of a step when it is idle time: named also where its cause is not known."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpbench.reports.analysis.measures.findings import Finding
from fsdpbench.reports.analysis.model import RankAnalysis

_EXPLAINED = 0.5
"""A finding that costs this much of the idle time says what there is to say of it."""
_WORTH_NAMING = 0.1
_WORDS = {
    "allocator": "the CPU is in the driver's allocation calls",
    "rate_limiter": "the CPU waits for FSDP's rate limiter",
    "synchronization": "the CPU waits for the device",
    "cpu": "the CPU has not launched the next kernel yet",
    "launch_latency": "launches are on their way",
    "event": "launched work has not started yet",
}


def largest_idle(rank: RankAnalysis, found: Sequence[Finding]) -> Finding | None:
    """A finding where the device idles more than it computes, and more than it waits for communication."""
    time = rank.time
    if rank.kind != "gpu" or time.idle < max(time.compute_only + time.overlapped, time.exposed_communication):
        return None
    if any(finding.share >= _EXPLAINED * time.idle / time.total for finding in found):
        return None
    share = time.idle / time.total
    text = f"{100 * share:.0f} % of the time the GPU is idle{_why(rank)}."
    return Finding("idle", share, None, text)


def _why(rank: RankAnalysis) -> str:
    causes = rank.idle_causes.parts()
    if not causes and not rank.cpu_seen:
        return ", CPU not seen: the trace has no launches that would tell why (record ProfilerActivity.CPU)"
    if not causes:
        return ", and the reason is unknown: not all launches are in the trace"
    told = [
        f"{_WORDS[name]} ({100 * ns / rank.time.total:.0f} %)"
        for name, ns in sorted(causes.items(), key=lambda pair: -pair[1])
        if ns >= _WORTH_NAMING * rank.time.idle
    ]
    return f": {', '.join(told)}" if told else ""
