"""What came of a figure: each point published and simulated, the band of other settings, its claims."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.reproduce.figure import Claim, PaperFigure, Place, Point, Variant
from fsdpbench.reproduce.run import Runs
from fsdpbench.results.records import Status
from fsdpbench.validation.predict import Prediction
from fsdpbench.validation.runs.case import Case, Figure

Values = Mapping[tuple[str, Place], float | None]


@dataclass(frozen=True)
class Simulated:
    """One point simulated, in the publication's unit, and the range over plausible settings."""

    point: Point
    value: float | None
    status: Status
    interval: tuple[float, float] | None
    band: tuple[float, float] | None

    @property
    def error(self) -> float | None:
        """Simulated over published, less one."""
        return _error(self.point, self.value)


@dataclass(frozen=True)
class Tried:
    """Other settings: the value of each point that they change, and their mean error."""

    words: str
    values: Values
    mean_error: float | None


@dataclass(frozen=True)
class Judged:
    """A claim on both sides; `same`: the simulation says what the publication says."""

    claim: Claim
    published: float | None
    simulated: float | None

    @property
    def same(self) -> bool | None:
        """None: one side has no value."""
        return self.claim.holds(self.simulated) if self.claim.holds(self.published) else None


@dataclass(frozen=True)
class Outcome:
    """A figure as it was reproduced."""

    figure: PaperFigure
    points: tuple[Simulated, ...]
    tried: tuple[Tried, ...]
    claims: tuple[Judged, ...]

    @property
    def errors(self) -> list[float]:
        """Of all points that both sides have, unless the published value is 0."""
        return [abs(each.error) for each in self.points if each.error is not None]

    @property
    def mean_error(self) -> float | None:
        return statistics.fmean(self.errors) if self.errors else None

    @property
    def worst_error(self) -> float | None:
        return max(self.errors, default=None)

    @property
    def nearest(self) -> Tried | None:
        """The other settings that come nearer to what was published than those assumed, the most of all."""
        gains = {
            index: each.mean_error / assumed
            for index, each in enumerate(self.tried)
            if each.mean_error is not None and (assumed := self.mean_error_of(each))
        }
        best = min(gains, key=gains.__getitem__, default=None)
        return None if best is None or gains[best] >= 1 else self.tried[best]

    def mean_error_of(self, tried: Tried) -> float:
        """The mean error of the assumed settings over the points that `tried` changes."""
        errors = [
            abs(each.error)
            for each in self.points
            if each.error is not None and tried.values.get((each.point.series, each.point.x)) is not None
        ]
        return statistics.fmean(errors) if errors else 0.0


def outcome_of(figure: PaperFigure, runs: Runs) -> Outcome:
    """The figure with what was simulated of it."""
    tried = tuple(_tried(figure, variant, runs) for variant in figure.variants)
    points = tuple(_simulated(point, runs.of(point.case), tried) for point in figure.points)
    published = {(point.series, point.x): point.published for point in figure.points}
    simulated = {(each.point.series, each.point.x): each.value for each in points}
    claims = tuple(
        Judged(claim, claim.measure(_lookup(published)), _of_what_ran(claim, simulated, points))
        for claim in figure.claims
    )
    return Outcome(figure, points, tried, claims)


def _of_what_ran(claim: Claim, values: Values, points: tuple[Simulated, ...]) -> float | None:
    """A claim may count runs that were out of memory: a run without an answer leaves it open."""
    if any(each.status not in (Status.OK, Status.OOM) for each in points):
        return None
    return claim.measure(_lookup(values))


def _lookup(values: Values) -> Any:
    return lambda series, x: values[series, x]


def _simulated(point: Point, prediction: Prediction, tried: tuple[Tried, ...]) -> Simulated:
    value = prediction.predicted(point.kind)
    others = [each.values.get((point.series, point.x)) for each in tried]
    known = [each for each in (value, *others) if each is not None]
    band = (min(known), max(known)) if tried and len(known) > 1 else None
    status = Status(prediction.result["status"])
    return Simulated(point, value, status, _interval(point, prediction), band)


def _interval(point: Point, prediction: Prediction) -> tuple[float, float] | None:
    """The 90 % interval of the simulated value, in the publication's unit."""
    value: Any = prediction.result.get("interval")
    for key in point.kind.path:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value is None else (value[0] / point.kind.unit, value[1] / point.kind.unit)


def _tried(figure: PaperFigure, variant: Variant, runs: Runs) -> Tried:
    values: dict[tuple[str, Place], float | None] = {}
    errors = []
    for point in figure.points:
        prediction = _prediction(variant, point.case, runs)
        if prediction is None:
            continue
        value = prediction.predicted(point.kind)
        values[point.series, point.x] = value
        error = _error(point, value)
        errors += [] if error is None else [abs(error)]
    return Tried(variant.words, values, statistics.fmean(errors) if errors else None)


def _prediction(variant: Variant, case: Case, runs: Runs) -> Prediction | None:
    if variant.change is None:
        return variant.ready.get(case.name)
    changed = variant.change(case)
    return None if changed is None else runs.of(changed)


def _error(point: Point, value: float | None) -> float | None:
    if point.kind is Figure.RETRIES:
        return None  # over how many steps they were counted is not published
    return value / point.published - 1 if value is not None and point.published else None
