"""The outcome of a figure: each point published and simulated, the band of other settings, and its claims;
also all of it as JSON, for the file beside the page."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fsdpbench.engine.results.provenance import versions
from fsdpbench.engine.results.records import Status
from fsdpbench.lab.reproduce import figure as figures
from fsdpbench.lab.reproduce.run import Runs, TracedRun
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Case, Figure

Values = Mapping[tuple[str, figures.Place], float | None]
SCHEMA = 2


@dataclass(frozen=True)
class Simulated:
    """One simulated point, in the publication's unit, and its range over plausible settings."""

    point: figures.Point
    value: float | None
    status: Status
    interval: tuple[float, float] | None
    band: tuple[float, float] | None

    @property
    def error(self) -> float | None:
        """Return simulated over published, minus one."""
        return _error(self.point, self.value)


@dataclass(frozen=True)
class Tried:
    """Other settings: the value of each point that they change, and their mean error."""

    variant: figures.Variant
    values: Values
    mean_error: float | None


class Verdict(Enum):
    """Whether the simulation agrees with a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    DEPENDS = "depends on settings that are not published"
    TAKEN = "not a test"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Judged:
    """A claim on both sides. `others`: its values under those other plausible settings that change it."""

    claim: figures.Claim
    bounds: figures.Bounds
    published: float
    simulated: float | None
    others: tuple[float, ...]
    verdict: Verdict

    @property
    def same_direction(self) -> bool:
        """Return whether the simulated effect, if there is one, has the published sign under all settings."""
        values = [each for each in (self.simulated, *self.others) if each is not None]
        if self.claim.kind is not figures.Kind.RATIO or abs(self.published - 1) < figures.LEAST_RATIO:
            return self.verdict is Verdict.HOLDS
        return bool(values) and all((each > 1) == (self.published > 1) for each in values)


@dataclass(frozen=True)
class Outcome:
    """A reproduced figure."""

    figure: figures.PaperFigure
    points: tuple[Simulated, ...]
    tried: tuple[Tried, ...]
    claims: tuple[Judged, ...]

    @property
    def errors(self) -> list[float]:
        """Return the errors of all points with values on both sides, unless the published value is 0."""
        return [abs(each.error) for each in self.points if each.error is not None]

    @property
    def mean_error(self) -> float | None:
        return _mean(self.errors)

    @property
    def worst_error(self) -> float | None:
        return max(self.errors, default=None)

    @property
    def mean_errors(self) -> list[float]:
        """Return the mean errors on all points, under the assumed and other plausible settings."""
        others = (self._mean_error_with(each) for each in self.plausible if each.mean_error is not None)
        return [] if self.mean_error is None else [self.mean_error, *others]

    @property
    def plausible(self) -> list[Tried]:
        """Return the other settings that no statement of the publication contradicts."""
        return [each for each in self.tried if not each.variant.contradicts]

    def _mean_error_with(self, tried: Tried) -> float:
        values = [tried.values.get((each.point.series, each.point.x), each.value) for each in self.points]
        return _mean(map(_error, (each.point for each in self.points), values)) or 0.0

    def mean_error_of(self, tried: Tried) -> float:
        """Return the mean error of the assumed settings over the points that `tried` changes."""
        values = tried.values
        changed = (each for each in self.points if values.get((each.point.series, each.point.x)) is not None)
        return _mean(each.error for each in changed) or 0.0


def outcome_of(figure: figures.PaperFigure, runs: Runs) -> Outcome:
    """Return the figure together with its simulated values."""
    tried = tuple(_tried(figure, variant, runs) for variant in figure.variants)
    points = tuple(_simulated(point, runs.of(point.case), tried) for point in figure.points)
    claims = tuple(_judged(claim, figure, points, tried) for claim in figure.claims)
    return Outcome(figure, points, tried, claims)


def _judged(
    claim: figures.Claim, figure: figures.PaperFigure, points: tuple[Simulated, ...], tried: tuple[Tried, ...]
) -> Judged:
    bounds = claim.bounds(figure.about)
    published = claim.measure(figure.about.at)
    assert published is not None  # otherwise `bounds` has raised
    values = {(each.point.series, each.point.x): each.value for each in points}
    answered = all(each.status in (Status.OK, Status.OOM) for each in points)
    simulated = claim.measure(_lookup(values)) if answered else None
    others = (
        claim.measure(_lookup({**values, **each.values}))
        for each in tried
        if not each.variant.contradicts and not each.values.keys().isdisjoint(claim.places)
    )
    found = tuple(other for other in others if other is not None) if answered else ()
    verdict = _verdict(claim, bounds, (simulated, *found), answered)
    return Judged(claim, bounds, published, simulated, found, verdict)


def _verdict(
    claim: figures.Claim, bounds: figures.Bounds, values: tuple[float | None, ...], answered: bool
) -> Verdict:
    """Judge a claim; ignore settings under which memory runs out, because the published run did not."""
    if claim.taken:
        return Verdict.TAKEN
    if not answered:
        return Verdict.UNKNOWN
    holding = [bounds.hold(value) for value in values if value is not None]
    if holding and all(holding):
        return Verdict.HOLDS
    return Verdict.DEPENDS if any(holding) else Verdict.FAILS


def _lookup(values: Values) -> Any:
    return lambda series, x: values[series, x]


def _simulated(point: figures.Point, prediction: Prediction, tried: tuple[Tried, ...]) -> Simulated:
    value = prediction.predicted(point.kind)
    plausible = [each for each in tried if not each.variant.contradicts]
    others = [each.values.get((point.series, point.x)) for each in plausible]
    known = [each for each in (value, *others) if each is not None]
    band = (min(known), max(known)) if plausible and len(known) > 1 else None
    return Simulated(point, value, prediction.result.status, _interval(point, prediction), band)


def _interval(point: figures.Point, prediction: Prediction) -> tuple[float, float] | None:
    """Return the 90 % interval of the simulated value, in the publication's unit."""
    value = prediction.result.stored(".".join(("interval", *point.kind.path)))
    return None if value is None else (value[0] / point.kind.unit, value[1] / point.kind.unit)


def _tried(figure: figures.PaperFigure, variant: figures.Variant, runs: Runs) -> Tried:
    both = ((point, _prediction(variant, point.case, runs)) for point in figure.points)
    found = [(point, each.predicted(point.kind)) for point, each in both if each is not None]
    values = {(point.series, point.x): value for point, value in found}
    return Tried(variant, values, _mean(_error(*each) for each in found))


def _mean(errors: Iterable[float | None]) -> float | None:
    """Return the mean size of the known errors; None if there are none."""
    known = [abs(error) for error in errors if error is not None]
    return statistics.fmean(known) if known else None


def _prediction(variant: figures.Variant, case: Case, runs: Runs) -> Prediction | None:
    if variant.change is None:
        return variant.ready.get(case.name)
    changed = variant.change(case)
    return None if changed is None else runs.of(changed)


def _error(point: figures.Point, value: float | None) -> float | None:
    if point.kind is Figure.RETRIES:
        return None  # the number of steps they were counted over is not published
    return value / point.published - 1 if value is not None and point.published else None


def counted(outcomes: Sequence[Outcome]) -> dict[Verdict, int]:
    """Return the number of claims by verdict."""
    found = Counter(claim.verdict for outcome in outcomes for claim in outcome.claims)
    return {verdict: found[verdict] for verdict in Verdict}


def as_dict(
    publication: str, outcomes: Sequence[Outcome], traced: Sequence[Sequence[Sequence[TracedRun]]]
) -> dict[str, object]:
    """Return every figure with its points, claims, variants and traces."""
    return {
        "schema": SCHEMA,
        "publication": publication,
        "simulated": True,
        "versions": versions(),
        "claims": {verdict.name.lower(): count for verdict, count in counted(outcomes).items()},
        "figures": [_figure(outcome, runs) for outcome, runs in zip(outcomes, traced, strict=True)],
    }


def _claim(each: Judged) -> dict[str, object]:
    return {
        "words": each.claim.words,
        "kind": each.claim.kind.name.lower(),
        "least": each.bounds.low,
        "most": each.bounds.high if math.isfinite(each.bounds.high) else None,
        "published": each.published,
        "simulated": each.simulated,
        "other_settings": list(each.others),
        "verdict": each.verdict.name.lower(),
        "same_direction": each.same_direction,
        "set_from_it": each.claim.taken or None,
    }


def _figure(outcome: Outcome, traced: Sequence[Sequence[TracedRun]]) -> dict[str, object]:
    figure, words = outcome.figure, outcome.figure.words
    return {
        "name": figure.name,
        "title": words.title,
        "shows": words.shows,
        "source": figure.about.source,
        "read": figure.about.read,
        "unit": figure.about.unit,
        "assumed": list(words.assumed),
        "settings_published": not figure.is_open,
        "mean_error": outcome.mean_error,
        "mean_errors": outcome.mean_errors,
        "worst_error": outcome.worst_error,
        "points": [
            {
                "series": each.point.series,
                "x": each.point.x,
                "published": each.point.published,
                "simulated": each.value,
                "status": each.status.value,
                "error": each.error,
                "interval": each.interval,
                "band": each.band,
            }
            for each in outcome.points
        ],
        "variants": [
            {
                "words": each.variant.words,
                "contradicts": each.variant.contradicts or None,
                "mean_error": each.mean_error,
                "mean_error_assumed": outcome.mean_error_of(each),
                "points": [
                    {"series": series, "x": x, "simulated": value}
                    for (series, x), value in each.values.items()
                ],
            }
            for each in outcome.tried
        ],
        "claims": [_claim(each) for each in outcome.claims],
        "differs": words.differs or None,
        "contrasts": [
            {"why": why, "runs": [{"words": run.words, **run.facts} for run in runs]}
            for why, runs in zip(words.why, traced, strict=True)
        ],
    }
