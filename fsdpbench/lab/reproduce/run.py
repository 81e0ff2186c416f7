"""Runs the cases that figures need, each configuration once, in one folder that can be resumed; reads traces
of contrasts: how the step time is divided, and an excerpt of the timeline by stream."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.reading import JsonObject
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import TRACE_FOLDER
from fsdpbench.engine.results.store import point_folder_name
from fsdpbench.lab.reproduce.figure import Contrast, PaperFigure
from fsdpbench.lab.validation.paper_network import Prediction, config_of
from fsdpbench.lab.validation.runs.case import Case
from fsdpbench.reports.analysis import RankAnalysis, analyze_trace
from fsdpbench.reports.analysis.figures import PARTS
from fsdpbench.reports.pages.memory_charts import memory_chart
from fsdpbench.reports.pages.timeline import pack_timeline
from fsdpbench.reports.readers import read_trace
from fsdpbench.reports.result import Result
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sweep.runner import UNTRACED, simulate
from fsdpbench.sweep.trials import Progress

_TRACED = dataclasses.replace(UNTRACED, traced_steps=1)
_TRACE = f"{TRACE_FOLDER}/rank0_trace.json.gz"
_MOST_EVENTS = 1_200
_MOST_POINTS = 400
_MS = 1e6


@dataclass(frozen=True)
class Runs:
    """The results of all cases, and the traces of some."""

    folder: Path
    _configs: Mapping[str, Config]
    _results: Mapping[str, Result]
    _ready: Mapping[str, Prediction]

    def of(self, case: Case) -> Prediction:
        """Return the case with its result."""
        if case.name in self._ready:
            return self._ready[case.name]
        return Prediction(case, self._results[content_key(self._configs[_identity(case)])])

    def trace_of(self, case: Case) -> Path | None:
        """Return the trace of the case's run; None if it has none."""
        path = self.folder / point_folder_name(self._configs[_identity(case)]) / _TRACE
        return path if path.is_file() else None

    @property
    def failed(self) -> list[str]:
        """Return why runs failed without an answer, without repeats."""
        causes = (
            str(result.message or result.status.value)
            for key in map(content_key, self._configs.values())
            if not (result := self._results[key]).status.is_answer
        )
        return list(dict.fromkeys(causes))


def run(figures: Sequence[PaperFigure], folder: Path, progress: Progress, jobs: int | None = None) -> Runs:
    """Simulate what `folder` does not hold yet, figure by figure. After an interruption, a call resumes."""
    ready = {name: prediction for figure in figures for name, prediction in figure.ready.items()}
    traced = {_identity(case) for case in _contrasted(figures)}
    configs: dict[str, Config] = {}
    for case in _cases(figures):
        identity = _identity(case)
        if identity not in configs and case.name not in ready:
            configs[identity] = config_of(case, measurement=_TRACED if identity in traced else UNTRACED)
    results = simulate(list(configs.values()), folder, progress, jobs) if configs else {}
    return Runs(folder, configs, results, ready)


def _cases(figures: Iterable[PaperFigure]) -> Iterator[Case]:
    for figure in figures:
        yield from (point.case for point in figure.points)
        yield from _contrasted([figure])
        for variant in figure.variants:
            if variant.change is not None:
                changed = (variant.change(point.case) for point in figure.points)
                yield from (case for case in changed if case is not None)


def _contrasted(figures: Iterable[PaperFigure]) -> Iterator[Case]:
    return (case for figure in figures for contrast in figure.contrasts for case in contrast.runs.values())


def _identity(case: Case) -> str:
    """Return a string that is equal for cases with the same simulation, whatever was published."""
    return repr(dataclasses.replace(case, name="", group="", published={}, assumed=""))


@dataclass(frozen=True)
class TracedRun:
    """One run of a contrast, and data for its charts, which the page's script draws.

    `facts`: parts of the traced step in milliseconds, and communication by kind of collective.
    """

    words: str
    facts: JsonObject
    timeline: Mapping[str, object] | None
    memory: Mapping[str, object] | None


def traced_runs(figure: PaperFigure, runs: Runs) -> list[list[TracedRun]]:
    """Return the runs of each contrast of the figure, without those that have no trace."""
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


def _facts(analysis: RankAnalysis) -> JsonObject:
    """Return figures of the last traced step."""
    step = analysis.steps[-1]
    retries = [each for each in analysis.memory.retries if each.step == step.index]
    return {
        "step_ms": step.duration / _MS,
        **{f"{part}_ms": getattr(step.time, part) / _MS for part in PARTS},
        "overlap_fraction": step.time.overlap_fraction,
        "retries": len(retries),
        "stood_still_ms": sum(each.cost or 0 for each in retries) / _MS,
        "communication": {
            name: {
                "count": found.count,
                "time_ms": found.time / _MS,
                "exposed_ms": found.exposed / _MS,
                "gib": None if found.bytes is None else found.bytes / 2**30,
                "bus_gb_s": None if found.bus_bandwidth is None else found.bus_bandwidth / 1e9,
            }
            for name, found in step.communication.items()
        },
    }


def summed_up(runs: Sequence[TracedRun]) -> str:
    """Return one sentence on the traces."""
    if any(run.facts["retries"] for run in runs):
        parts = [
            f"{run.facts['retries']} retries a step, computation stood still for "
            f"{_ms(run, 'stood_still_ms')} ms of {_ms(run, 'step_ms')} ({run.words})"
            for run in runs
        ]
        return f"In these traces: {'; '.join(parts)}."
    parts = [
        f"{_ms(run, 'exposed_communication_ms')} of {_ms(run, 'step_ms')} ms ({run.words})" for run in runs
    ]
    return f"Exposed communication in these traces: {', '.join(parts)}." if parts else ""


def _ms(run: TracedRun, key: str) -> str:
    return f"{run.facts[key]:,.0f}"
