"""The traces of a contrast: where the step goes, and a stretch of it by stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.lab.reproduce.figure import Contrast, PaperFigure
from fsdpbench.lab.reproduce.run import Runs
from fsdpbench.reports.analysis import RankAnalysis, analyze_trace
from fsdpbench.reports.pages.memory_charts import memory_chart
from fsdpbench.reports.pages.timeline import pack_timeline
from fsdpbench.reports.readers import read_trace
from fsdpbench.sim.model.profile import load_profile

_MOST_EVENTS = 1_200
_MOST_POINTS = 400
_MS = 1e6


@dataclass(frozen=True)
class Communicated:
    """The collectives of one kind in a step: how many, their times, and what they moved, if known."""

    count: int
    time_ms: float
    exposed_ms: float
    gib: float | None
    bus_gb_s: float | None


@dataclass(frozen=True)
class Facts:
    """The traced step: where its milliseconds go, and what was communicated."""

    step_ms: float
    compute_only_ms: float
    overlapped_ms: float
    exposed_communication_ms: float
    idle_ms: float
    overlap_fraction: float | None
    retries: int
    stood_still_ms: float
    communication: Mapping[str, Communicated]


@dataclass(frozen=True)
class TracedRun:
    """One run of a contrast, and the pictures of it: plain values, as the page's script draws them."""

    words: str
    facts: Facts
    timeline: Mapping[str, object] | None
    memory: Mapping[str, object] | None


def traced_runs(figure: PaperFigure, runs: Runs) -> list[list[TracedRun]]:
    """For each contrast of the figure its runs, without those that left no trace."""
    return [list(_runs(contrast, runs)) for contrast in figure.contrasts]


def _runs(contrast: Contrast, runs: Runs) -> Iterator[TracedRun]:
    for words, case in contrast.runs.items():
        path = runs.trace_of(case)
        if path is not None:
            yield _traced(words, path, contrast, load_profile(case.hardware).usable_memory_bytes)


def _traced(words: str, path: Path, contrast: Contrast, usable_bytes: int) -> TracedRun:
    trace = read_trace(path)
    analysis = analyze_trace(trace)
    step = analysis.steps[-1]
    timeline = memory = None
    if contrast.memory:
        chart = memory_chart(trace, analysis, usable_bytes, _MOST_POINTS)
        memory = chart.figure() if chart else None
    else:
        length = round(step.duration * contrast.units / max(len(analysis.units), 1))
        start = step.start + round(step.duration * contrast.window)
        timeline = pack_timeline(
            trace, dataclasses.replace(step, start=start, end=start + length), _MOST_EVENTS
        )
    return TracedRun(words, _facts(analysis), timeline, memory)


def _facts(analysis: RankAnalysis) -> Facts:
    """Figures of the last traced step."""
    step = analysis.steps[-1]
    retries = [each for each in analysis.memory.retries if each.step == step.index]
    return Facts(
        step_ms=step.duration / _MS,
        compute_only_ms=step.time.compute_only / _MS,
        overlapped_ms=step.time.overlapped / _MS,
        exposed_communication_ms=step.time.exposed_communication / _MS,
        idle_ms=step.time.idle / _MS,
        overlap_fraction=step.time.overlap_fraction,
        retries=len(retries),
        stood_still_ms=sum(each.cost or 0 for each in retries) / _MS,
        communication={
            name: Communicated(
                found.count,
                found.time / _MS,
                found.exposed / _MS,
                None if found.bytes is None else found.bytes / 2**30,
                None if found.bus_bandwidth is None else found.bus_bandwidth / 1e9,
            )
            for name, found in step.communication.items()
        },
    )


def summed_up(runs: Sequence[TracedRun]) -> str:
    """Return one sentence on the traces."""
    if any(run.facts.retries for run in runs):
        parts = [
            f"{run.facts.retries} retries a step, computation stood still for "
            f"{_ms(run, 'stood_still_ms')} ms of {_ms(run, 'step_ms')} ({run.words})"
            for run in runs
        ]
        return f"In these traces: {'; '.join(parts)}."
    parts = [
        f"{_ms(run, 'exposed_communication_ms')} of {_ms(run, 'step_ms')} ms ({run.words})" for run in runs
    ]
    return f"Exposed communication in these traces: {', '.join(parts)}." if parts else ""


def _ms(run: TracedRun, key: str) -> str:
    return f"{getattr(run.facts, key):,.0f}"
