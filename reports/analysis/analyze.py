"""From paths to the analysis: one trace at a time (in each process), so that memory holds one rank only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fsdpbench.reports.analysis.device.activity import Activity, find_activity
from fsdpbench.reports.analysis.device.roof import Links, links_of
from fsdpbench.reports.analysis.device.units import NUMBERED_UNITS, FsdpSpans, fsdp_spans, unit_of
from fsdpbench.reports.analysis.device.windows import Window, phase_marks, phase_windows, step_windows
from fsdpbench.reports.analysis.figures import collective_figures, phase_parts, time_parts
from fsdpbench.reports.analysis.inputs import TraceFile, find_traces
from fsdpbench.reports.analysis.measures.fused_kernels import name_totals
from fsdpbench.reports.analysis.measures.idle import find_idle_causes
from fsdpbench.reports.analysis.measures.lateness import GatherTiming, time_gathers
from fsdpbench.reports.analysis.measures.memory import analyze_memory
from fsdpbench.reports.analysis.measures.sanity import check
from fsdpbench.reports.analysis.measures.snapshot import SnapshotAnalysis, read_snapshot
from fsdpbench.reports.analysis.measures.stragglers import collective_durations
from fsdpbench.reports.analysis.measures.work_counts import count_work
from fsdpbench.reports.analysis.model import (
    Analysis,
    CollectiveFigures,
    Problem,
    RankAnalysis,
    RanksSummary,
    StepAnalysis,
    UnitAnalysis,
    merge,
)
from fsdpbench.reports.analysis.operators import Chip, work_tables
from fsdpbench.reports.analysis.operators.calls import chip_of
from fsdpbench.reports.analysis.parallel import end_with_the_caller, interruptions_held
from fsdpbench.reports.analysis.ranks import summarize
from fsdpbench.reports.analysis.time_parts import TimeParts
from fsdpbench.reports.analysis.words.verdict import judge_rank
from fsdpbench.reports.trace import Category, Trace, TraceError, TraceLimits, read_trace

Draw = Callable[[Trace, RankAnalysis], Any]


def analyze(
    paths: Sequence[Path | str],
    *,
    processes: int = 1,
    links: Mapping[str, Links] | None = None,
    limits: TraceLimits | None = None,
    chips: Mapping[str, Chip] | None = None,
    draw: Draw | None = None,
) -> Analysis:
    """Analyses every trace and memory snapshot behind the paths (files, or folders searched for them).

    A broken file among a folder's others is a `Problem` of the result; a broken file that was named, and a
    folder with no readable trace, raise.

    Args:
        processes: how many traces to read at a time, each in a process of its own (started afresh, so the
            calling program must be importable, as `multiprocessing` demands); 1 reads here, one by one.
        links: by the devices' names in traces, what they are connected by; simulated traces say it.
        limits: how much a file may ask for, as for `read_trace`.
        chips: by the devices' names in traces, what they can do at most.
        draw: called with each trace while it is there; what it returns is the rank's `drawing`. With several
            processes a function of a module, or a `partial` of one.

    Raises:
        TraceError: see above, or a path that does not exist.
    """
    files = find_traces(paths)
    ranks: list[RankAnalysis] = []
    snapshots: list[SnapshotAnalysis] = []
    problems: list[Problem] = []
    unread: Counter[str] = Counter()
    read = partial(_outcome, links=links or {}, limits=limits, chips=chips or {}, draw=draw)
    for file, outcome in zip(files, _outcomes(files, min(processes, len(files)), read), strict=True):
        if isinstance(outcome, RankAnalysis):
            ranks.append(outcome)
        elif isinstance(outcome, list):
            snapshots += outcome
        elif file.asked_for:
            raise outcome
        else:
            problems.append(Problem(outcome.path, outcome.reason))
            unread[file.configuration or ""] += 1
    if not ranks and not snapshots:
        first = problems[0]
        raise TraceError(first.path, first.reason)
    return Analysis(tuple(ranks), _by_configuration(ranks, unread), tuple(problems), tuple(snapshots))


_Outcome = RankAnalysis | list[SnapshotAnalysis] | TraceError


def _outcomes(
    files: Sequence[TraceFile], processes: int, read: Callable[[TraceFile], _Outcome]
) -> Iterator[_Outcome]:
    """What came of each file, in their order."""
    if processes <= 1:
        yield from map(read, files)
        return
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=end_with_the_caller
    ) as pool:
        with interruptions_held():
            outcomes = pool.map(read, files)
        try:
            yield from outcomes
        except BrokenProcessPool:
            reason = "or one beside it, was not read to its end: a process died, out of memory?"
            raise TraceError(files[0].path, reason) from None


def _outcome(
    file: TraceFile,
    links: Mapping[str, Links],
    limits: TraceLimits | None,
    chips: Mapping[str, Chip],
    draw: Draw | None,
) -> _Outcome:
    try:
        if file.is_snapshot:
            return read_snapshot(file.path, limits)
        trace = read_trace(file.path, limits)
        rank = analyze_trace(trace, configuration=file.configuration, links=links, chips=chips)
        return rank if draw is None else replace(rank, drawing=draw(trace, rank))
    except TraceError as error:
        return error
    except MemoryError:
        return TraceError(file.path, "needs more memory than there is")


def analyze_trace(
    trace: Trace,
    *,
    configuration: str | None = None,
    links: Mapping[str, Links] | None = None,
    chips: Mapping[str, Chip] | None = None,
) -> RankAnalysis:
    """All figures of one rank's trace; `links` and `chips` as for `analyze`."""
    spans = fsdp_spans(trace)
    connected = links_of(trace, links or {})
    activity = find_activity(trace, spans, connected)
    windows = step_windows(trace, activity)
    gate = check(trace, activity, windows)
    marks = phase_marks(trace)
    phase_lists = phase_windows(marks, activity, windows)
    gathers = time_gathers(activity, spans, windows, marks)
    steps = tuple(
        _analyze_step(activity, window, phases) for window, phases in zip(windows, phase_lists, strict=True)
    )
    phases: dict[str, TimeParts] = {}
    for step in steps:
        for name, parts in step.phases.items():
            phases[name] = phases.get(name, TimeParts()) + parts
    rank = RankAnalysis(
        rank=trace.rank or 0,
        path=trace.path,
        configuration=configuration,
        kind=activity.kind,
        simulated=trace.simulated,
        world_size=trace.world_size,
        trusted=gate.trusted,
        warnings=(*gate.doubts, *gate.remarks, *([NUMBERED_UNITS] if spans.numbered else [])),
        steps=steps,
        time=sum((step.time for step in steps), TimeParts()),
        communication=_over_steps(steps),
        phases=phases,
        units=analyze_units(activity, spans, gathers),
        idle_causes=find_idle_causes(trace, activity, spans, windows[0].start, windows[-1].end),
        memory=analyze_memory(trace, activity, windows, marks, spans),
        overlap_known=gate.overlap_known,
        links=connected,
        durations=collective_durations(trace, activity),
        work=count_work(trace, activity, spans, windows),
        names=name_totals(trace, activity, windows),
        cpu_seen=bool(len(trace.rows(Category.CPU_OP, Category.RUNTIME))),
        tables=work_tables(trace, activity, windows, chip_of(trace, chips or {})),
    )
    return replace(rank, verdict=judge_rank(rank))


def _analyze_step(activity: Activity, window: Window, phases: list[Window]) -> StepAnalysis:
    return StepAnalysis(
        index=window.index,
        start=window.start,
        end=window.end,
        time=time_parts(activity, window.start, window.end),
        communication=collective_figures(activity, window=window),
        phases=phase_parts(activity, window, phases),
    )


def _over_steps(steps: Sequence[StepAnalysis]) -> dict[str, CollectiveFigures]:
    names = dict.fromkeys(name for step in steps for name in step.communication)
    return {
        name: merge([step.communication[name] for step in steps if name in step.communication])
        for name in names
    }


def _by_configuration(ranks: Sequence[RankAnalysis], unread: Counter[str]) -> dict[str, RanksSummary]:
    groups: dict[str, list[RankAnalysis]] = {}
    for rank in ranks:
        groups.setdefault(rank.configuration or "", []).append(rank)
    return {name: summarize(group, unread[name]) for name, group in groups.items()}


def analyze_units(
    activity: Activity, spans: FsdpSpans, gathers: Sequence[GatherTiming]
) -> tuple[UnitAnalysis, ...]:
    """Every unit that communicated, over the whole trace, in order of first appearance."""
    work = activity.collectives.work
    unit = unit_of(spans, work.launch_lane, work.launch)
    return tuple(
        UnitAnalysis(
            name,
            collective_figures(activity, unit == number),
            tuple(gather for gather in gathers if gather.unit == name),
        )
        for number, name in enumerate(spans.units)
        if (unit == number).any()
    )
