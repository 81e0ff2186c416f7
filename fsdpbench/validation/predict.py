"""Simulates cases through the ordinary sweep, so that they resume and run side by side like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.configuration.config import Config, Measurement
from fsdpbench.configuration.settings import Settings
from fsdpbench.results.provenance import content_key
from fsdpbench.sweep.planning import make_config, make_target, without_absent
from fsdpbench.sweep.runner import Progress
from fsdpbench.sweep.simulated import UNTRACED, simulate
from fsdpbench.validation.runs.case import Case, Figure


@dataclass(frozen=True)
class Prediction:
    """A case with the result of its simulation."""

    case: Case
    result: dict[str, Any]

    def predicted(self, figure: Figure) -> float | None:
        """In the published figure's unit; `None` if the simulation did not finish."""
        value: Any = self.result
        for key in figure.path:
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else float(value) / figure.unit

    def error(self, figure: Figure) -> float | None:
        """Relative error: of the step time for a speed (above 0: predicted too slow), else of the figure."""
        predicted, published = self.predicted(figure), self.case.published[figure]
        if not predicted or not published:
            return None
        return published / predicted - 1 if figure.is_speed else predicted / published - 1

    @property
    def speed(self) -> Figure | None:
        return next((figure for figure in self.case.published if figure.is_time), None)

    @property
    def step_time_error(self) -> float | None:
        return None if self.speed is None else self.error(self.speed)


def config_of(case: Case, system: str | None = None, measurement: Measurement = UNTRACED) -> Config:
    """The case as a configuration, of the software that it names unless `system` is given."""
    target = make_target(
        model=case.model,
        shape=case.shape,
        device="sim",
        hardware=case.hardware,
        gpus=case.gpus,
        gpus_per_node=None,
        data=None,
        measurement=measurement,
        software=case.software,
    )
    return without_absent(
        make_config(target, system or case.system, Settings.of(**case.settings), target.workload())
    )


def predict(
    cases: Sequence[Case], system: str | None, folder: Path, progress: Progress, jobs: int | None = None
) -> list[Prediction]:
    """Run what `folder` does not hold yet and return every case with its result, in order; one that its
    system cannot do has status `not_applicable`."""
    configs = [config_of(case, system) for case in cases]
    results = simulate(configs, folder, progress, jobs)
    return [
        Prediction(case, results[content_key(config)]) for case, config in zip(cases, configs, strict=True)
    ]
