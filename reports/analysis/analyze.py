"""Analysis of trace files: each process reads one trace at a time, so its memory holds one rank only."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdpbench.reports.analysis import figures as found_figures
from fsdpbench.reports.analysis import intervals, model
from fsdpbench.reports.analysis.activity import Activity, find_activity
from fsdpbench.reports.analysis.idle import find_idle_causes
from fsdpbench.reports.analysis.lateness import GatherTiming, time_gathers
from fsdpbench.reports.analysis.memory import analyze_memory
from fsdpbench.reports.analysis.peaks import Chip, Links, chip_of, links_of
from fsdpbench.reports.analysis.records import seconds
from fsdpbench.reports.analysis.sanity import check
from fsdpbench.reports.analysis.snapshots import SUFFIXES as SNAPSHOT_SUFFIXES
from fsdpbench.reports.analysis.snapshots import SnapshotAnalysis, read_snapshot
from fsdpbench.reports.analysis.stragglers import Waiting, collective_durations, find_waiting
from fsdpbench.reports.analysis.tables import count_work, name_totals, work_tables
from fsdpbench.reports.analysis.units import NUMBERED_UNITS, FsdpSpans, fsdp_spans, unit_of
from fsdpbench.reports.analysis.verdict import judge_rank
from fsdpbench.reports.analysis.windows import Window, phase_marks, phase_windows, step_windows
from fsdpbench.reports.readers import Category, Trace, TraceError, TraceLimits, read_trace

Draw = Callable[[Trace, model.RankAnalysis], Any]


def analyze(
    paths: Sequence[Path | str],
    *,
    processes: int = 1,
    links: Mapping[str, Links] | None = None,
    limits: TraceLimits | None = None,
    chips: Mapping[str, Chip] | None = None,
    draw: Draw | None = None,
) -> model.Analysis:
    """Analyze every trace and memory snapshot in the paths (files, or folders searched for them).

    A broken file found in a folder becomes a `Problem` of the result. A broken file that the caller named,
    and a folder with no readable trace, raise.

    Args:
        processes: number of traces to read at a time, each in its own process (spawned, so the calling
            program must be importable, as `multiprocessing` demands); 1 reads here, one by one.
        links: the links of devices, by the devices' names in traces; simulated traces contain them.
        limits: limits on a file's demands, as for `read_trace`.
        chips: the peak rates of devices, by the devices' names in traces.
        draw: called with each trace while it is in memory; its return value becomes the rank's `drawing`.
            With several processes it must be a function of a module, or a `partial` of one.

    Raises:
        TraceError: see above, or a path does not exist.
    """
    files = find_traces(paths)
    ranks: list[model.RankAnalysis] = []
    snapshots: list[SnapshotAnalysis] = []
    problems: list[model.Problem] = []
    unread: Counter[str] = Counter()
    read = partial(_outcome, links=links or {}, limits=limits, chips=chips or {}, draw=draw)
    for file, outcome in zip(files, _outcomes(files, min(processes, len(files)), read), strict=True):
        if isinstance(outcome, model.RankAnalysis):
            ranks.append(outcome)
        elif isinstance(outcome, list):
            snapshots += outcome
        elif file.asked_for:
            raise outcome
        else:
            problems.append(model.Problem(outcome.path, outcome.reason))
            unread[file.configuration or ""] += 1
    if not ranks and not snapshots:
        first = problems[0]
        raise TraceError(first.path, first.reason)
    return model.Analysis(tuple(ranks), _by_configuration(ranks, unread), tuple(problems), tuple(snapshots))


_Outcome = model.RankAnalysis | list[SnapshotAnalysis] | TraceError


def _outcomes(
    files: "Sequence[TraceFile]", processes: int, read: "Callable[[TraceFile], _Outcome]"
) -> Iterator[_Outcome]:
    """Yield the outcome of each file, in their order."""
    if processes <= 1:
        yield from map(read, files)
        return
    # Imported here: reading a single trace does not need them.
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    from fsdpbench.reports.analysis.processes import end_with_the_caller, interruptions_held

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
    file: "TraceFile",
    links: Mapping[str, Links],
    limits: TraceLimits | None,
    chips: Mapping[str, Chip],
    draw: Draw | None,
) -> _Outcome:
    try:
        if file.path.name.endswith(SNAPSHOT_SUFFIXES):
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
) -> model.RankAnalysis:
    """Return all figures of a rank's trace. `configuration`: its folder's name; others as in `analyze`."""
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
    phases: dict[str, found_figures.TimeParts] = {}
    for step in steps:
        for name, parts in step.phases.items():
            phases[name] = phases.get(name, found_figures.TimeParts()) + parts
    rank = model.RankAnalysis(
        rank=trace.rank or 0,
        path=trace.path,
        configuration=configuration,
        kind=activity.kind,
        simulated=trace.simulated,
        world_size=trace.world_size,
        trusted=gate.trusted,
        warnings=(*gate.doubts, *gate.remarks, *([NUMBERED_UNITS] if spans.numbered else [])),
        steps=steps,
        time=sum((step.time for step in steps), found_figures.TimeParts()),
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
        cpu_time=_cpu_time(trace, windows),
        tables=work_tables(trace, activity, windows, chip_of(trace, chips or {})),
    )
    return replace(rank, verdict=judge_rank(rank))


def _cpu_time(trace: Trace, steps: Sequence[Window]) -> int:
    """Return how long (ns) within the steps the CPU runs operators or driver calls, waits excluded."""
    rows = trace.rows_named(lambda name: "Synchronize" not in name, Category.CPU_OP, Category.RUNTIME)
    busy = intervals.of(trace.events.start[rows], trace.events.ends(rows))
    return sum(intervals.clip(busy, step.mark.start, step.mark.end).length() for step in steps)


def _analyze_step(activity: Activity, window: Window, phases: list[Window]) -> model.StepAnalysis:
    return model.StepAnalysis(
        index=window.index,
        start=window.start,
        end=window.end,
        time=found_figures.time_parts(activity, window.start, window.end),
        communication=found_figures.collective_figures(activity, window=window),
        phases=found_figures.phase_parts(activity, window, phases),
    )


def _over_steps(steps: Sequence[model.StepAnalysis]) -> dict[str, found_figures.CollectiveFigures]:
    names = dict.fromkeys(name for step in steps for name in step.communication)
    return {
        name: found_figures.merge([step.communication[name] for step in steps if name in step.communication])
        for name in names
    }


def _by_configuration(
    ranks: Sequence[model.RankAnalysis], unread: Counter[str]
) -> dict[str, model.RanksSummary]:
    groups: dict[str, list[model.RankAnalysis]] = {}
    for rank in ranks:
        groups.setdefault(rank.configuration or "", []).append(rank)
    return {name: summarize(group, unread[name]) for name, group in groups.items()}


def analyze_units(
    activity: Activity, spans: FsdpSpans, gathers: Sequence[GatherTiming]
) -> tuple[model.UnitAnalysis, ...]:
    """Return every unit that communicated, over the whole trace, in order of first appearance."""
    work = activity.collectives.work
    unit = unit_of(spans, work.launch_lane, work.launch)
    return tuple(
        model.UnitAnalysis(
            name,
            found_figures.collective_figures(activity, unit == number),
            tuple(gather for gather in gathers if gather.unit == name),
        )
        for number, name in enumerate(spans.units)
        if (unit == number).any()
    )


def summarize(ranks: Sequence[model.RankAnalysis], unread: int = 0) -> model.RanksSummary:
    """Return mean, minimum and maximum of each figure; the slowest rank has the longest mean step.
    `unread`: number of traces of the same ranks that could not be read.

    Ranks of one job wait for each other in collectives, so their steps take about equally long; the rank
    that the others wait for is `waiting.straggler`.
    """
    numbers = tuple(rank.rank for rank in ranks)
    world_size = max((rank.world_size or 0 for rank in ranks), default=0) or None
    missing = max((world_size or 0) - len(set(numbers)), 0)
    simulated = any(rank.simulated for rank in ranks)
    few = f"{len(set(numbers))} of {world_size} ranks have a trace: a straggler may not be among them"
    doubts = _doubts(ranks, unread)
    means = [rank.mean_step for rank in ranks]
    figures: dict[str, list[float | None]] = {
        "step_time_s": [seconds(mean.total) for mean in means],
        **{f"{part}_s": [seconds(getattr(mean, part)) for mean in means] for part in found_figures.PARTS},
        "overlap_fraction": [rank.overlap_fraction for rank in ranks],
    }
    spreads = {name: found for name, of in figures.items() if (found := _spread(numbers, of)) is not None}
    return model.RanksSummary(
        ranks=numbers,
        world_size=world_size,
        missing_ranks=missing,
        slowest_rank=max(ranks, key=lambda rank: rank.mean_step.total).rank if ranks else None,
        figures=spreads,
        trusted=not doubts,
        warnings=(*doubts, *([few] if missing and not simulated else [])),
        waiting=_waiting(ranks),
    )


def _doubts(ranks: Sequence[model.RankAnalysis], unread: int) -> list[str]:
    """Return the reasons to distrust figures across these ranks."""
    doubts = [f"{unread} traces could not be read"] if unread else []
    numbers = [rank.rank for rank in ranks]
    twice = sorted(number for number, count in Counter(numbers).items() if count > 1)
    if twice:
        text = ", ".join(map(str, twice[:10]))
        doubts.append(f"some ranks have more than one trace: {text}{' and more' if len(twice) > 10 else ''}")
    sizes = sorted({rank.world_size for rank in ranks if rank.world_size is not None})
    if len(sizes) > 1:
        text = ", ".join(map(str, sizes[:10]))
        doubts.append(f"the traces are of different jobs: their world sizes are {text}")
    untrusted = sum(not rank.trusted for rank in ranks)
    if untrusted:
        doubts.append(f"{untrusted} of {len(ranks)} traces are not trusted")
    return doubts


def _waiting(ranks: Sequence[model.RankAnalysis]) -> Waiting | None:
    by_rank = {rank.rank: rank.durations for rank in ranks if rank.durations is not None}
    if len(by_rank) < len(ranks):
        return None
    return find_waiting(by_rank, sum(rank.time.total for rank in ranks) // len(ranks))


def _spread(ranks: Sequence[int], of: Sequence[float | None]) -> model.Spread | None:
    values = [(value, rank) for rank, value in zip(ranks, of, strict=True) if value is not None]
    if not values:
        return None
    greatest, at = max(values, key=lambda pair: pair[0])
    return model.Spread(sum(value for value, _ in values) / len(values), min(values)[0], greatest, at)


_SUFFIXES = (".json", ".json.gz", *SNAPSHOT_SUFFIXES)
_MOST_FILES = 500_000
"""Limit on the files in a folder: more is a whole disk, which takes minutes to search."""
_NOT_TRACES = ("_record.json", "config.json", "result.json")


@dataclass(frozen=True)
class TraceFile:
    """A file to read. `asked_for`: the user named it, so that an error in it is raised."""

    path: Path
    configuration: str | None
    asked_for: bool


def find_traces(paths: Sequence[Path | str]) -> list[TraceFile]:
    """Return the trace files behind the paths, in a stable order, each once.

    Raises:
        TraceError: a path does not exist, or a folder has no traces.
    """
    found: dict[Path, TraceFile] = {}
    for given in paths:
        path = Path(given)
        try:
            found |= _behind(path, found)
        except FileNotFoundError:
            raise TraceError(path, "does not exist") from None
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TraceError(path, f"cannot be read ({reason})") from None
    return list(found.values())


def _behind(path: Path, known: Mapping[Path, TraceFile]) -> dict[Path, TraceFile]:
    """Return the files behind one path, by resolved path; a file named directly has `asked_for` set."""
    if not path.is_dir():
        path.stat()  # raises if it does not exist
        return {path.resolve(): TraceFile(path, _configuration(path), asked_for=True)}
    inside = _in_folder(path)
    if not inside:
        raise TraceError(path, "holds no traces (no *.json or *.json.gz that could be one)")
    new: dict[Path, TraceFile] = {}
    for file in inside:
        place = file.path.resolve()
        if place not in known:
            new.setdefault(place, file)
    return new


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted, except those that vanish or cannot be opened."""
    found: list[Path] = []
    seen = 0
    for place, _, names in os.walk(folder):
        found += (Path(place, name) for name in names if name.endswith(_SUFFIXES))
        seen += 1 + len(names)
        if seen > _MOST_FILES:
            raise TraceError(folder, f"holds more than {_MOST_FILES:,} files: name a folder further down")
    return sorted(found)


def _in_folder(folder: Path) -> list[TraceFile]:
    """Return all files below the folder that may be traces; if some in a folder are named so, only those."""
    by_folder: dict[Path, list[Path]] = {}
    for file in _files_below(folder):
        if file.name.endswith(_SUFFIXES) and not file.name.endswith(_NOT_TRACES) and file.is_file():
            by_folder.setdefault(file.parent, []).append(file)
    found: list[TraceFile] = []
    for files in by_folder.values():
        named = [file for file in files if "trace" in file.name or file.name.endswith(SNAPSHOT_SUFFIXES)]
        found += [TraceFile(file, _configuration(file), asked_for=False) for file in named or files]
    return found


def _configuration(file: Path) -> str | None:
    """Return the name of the configuration's folder if the file is in one (`<name>/trace/<file>`)."""
    folder = file.absolute().parent
    if folder.name == "trace" and (folder.parent / "config.json").exists():
        return folder.parent.name
    return None
