"""Runs what figures need, each configuration once, in one folder that can be resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.configuration.config import Config
from fsdpbench.engine.results.provenance import content_key
from fsdpbench.engine.results.records import TRACE_FOLDER
from fsdpbench.engine.results.store import point_folder_name
from fsdpbench.lab.reproduce.figure import PaperFigure
from fsdpbench.lab.validation.paper_network import Prediction, config_of
from fsdpbench.lab.validation.runs.case import Case
from fsdpbench.reports.result import Result
from fsdpbench.sweep.runner import UNTRACED, simulate
from fsdpbench.sweep.trials import Progress

_TRACED = dataclasses.replace(UNTRACED, traced_steps=1)
_TRACE = f"{TRACE_FOLDER}/rank0_trace.json.gz"


@dataclass(frozen=True)
class Runs:
    """The results of all cases, and the traces of some."""

    folder: Path
    _configs: Mapping[str, Config]
    _results: Mapping[str, Result]
    _ready: Mapping[str, Prediction]

    def of(self, case: Case) -> Prediction:
        """The case with its result."""
        if case.name in self._ready:
            return self._ready[case.name]
        return Prediction(case, self._results[content_key(self._configs[_identity(case)])])

    def trace_of(self, case: Case) -> Path | None:
        """The trace of the case's run; None where it left none."""
        path = self.folder / point_folder_name(self._configs[_identity(case)]) / _TRACE
        return path if path.is_file() else None

    @property
    def failed(self) -> list[str]:
        """Why runs failed that should have come to an answer, each once."""
        causes = (
            str(result.message or result.status.value)
            for key in map(content_key, self._configs.values())
            if not (result := self._results[key]).status.is_answer
        )
        return list(dict.fromkeys(causes))


def run(figures: Sequence[PaperFigure], folder: Path, progress: Progress, jobs: int | None = None) -> Runs:
    """Simulate what `folder` does not hold yet, figure by figure. Interrupted, call it again to resume."""
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
    """Equal for cases whose simulation is the same, whatever was published of them."""
    return repr(dataclasses.replace(case, name="", group="", published={}, assumed=""))
