"""The targets of the simulation, and whether it meets them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Figure

MEAN_STEP_TIME = 0.04
WORST_STEP_TIME = 0.10
PLATEAU = 0.05
T5 = 0.05
_T5_GROUP = "FSDP paper, Fig 7c"
PREFETCH_GAIN_POINTS = 3.0
COLLAPSE_SHARE = (0.40, 0.65)
ALLOCATED_GB = 2.0
RESERVED_GB = 4.0


@dataclass(frozen=True)
class Bar:
    """One bar: what it asks, what was reached, whether that is enough."""

    name: str
    wanted: str
    reached: str
    met: bool


def judge(predictions: Sequence[Prediction]) -> list[Bar]:
    """Every bar that these predictions can decide."""
    groups = group_errors(predictions).values()
    bars = error_bars(
        "step time", [abs(error) for group in groups for error in group], (MEAN_STEP_TIME, WORST_STEP_TIME),
        "", " cases",
    )  # fmt: skip
    paper = [p for p in predictions if p.case.model == "gpt-175b" and not p.case.assumed]
    prefetching = [p for p in paper if p.case.settings.get("backward_prefetch") != "none"]
    bars += _worst("Fig 7b, plateau", PLATEAU, [p for p in prefetching if not p.case.collapsed])
    bars += [*_prefetch_gain(paper), *_collapse(paper), *_memory(paper)]
    return bars + _worst("Fig 7c, T5-11B", T5, [p for p in predictions if p.case.group == _T5_GROUP])


def bar_lines(bars: Sequence[Bar]) -> list[str]:
    """Return the bars as a table in Markdown, nothing without bars."""
    rows = [f"| {b.name} | {b.wanted} | {b.reached} | {'met' if b.met else '**not met**'} |" for b in bars]
    return ["| bar | wanted | reached | |", "|---|---|---|---|", *rows] if rows else []


def group_errors(predictions: Iterable[Prediction]) -> dict[str, list[float]]:
    """Step-time errors of the cases that count, by group; a case that did not finish is an error of 1."""
    groups: dict[str, list[float]] = {}
    for prediction in predictions:
        if prediction.speed is None or prediction.case.assumed or prediction.case.collapsed:
            continue
        error = prediction.step_time_error
        groups.setdefault(prediction.case.group, []).append(1.0 if error is None else error)
    return groups


def error_bars(
    what: str, errors: Sequence[float], bounds: tuple[float, float], of: str, cases: str
) -> list[Bar]:
    """Return the bars for the mean and the worst of `errors` (shares, without sign), none without errors.

    `bounds`: the largest mean, the largest error. `of` and `cases`: words behind the two counts.
    """
    if not errors:
        return []
    mean, worst = statistics.fmean(errors), max(errors)
    over = sum(error > bounds[1] for error in errors)
    reached = f"{worst:.1%} ({over} of {len(errors)}{cases} over {bounds[1]:.0%})"
    return [
        Bar(f"{what}, mean error", f"at most {bounds[0]:.0%}", f"{mean:.1%}{of}", mean <= bounds[0]),
        Bar(f"{what}, worst error", f"at most {bounds[1]:.0%}", reached, not over),
    ]


def _worst(name: str, within: float, predictions: Sequence[Prediction]) -> list[Bar]:
    """Return the bar for the largest error of the step time; a run that did not finish has one of 1."""
    errors = [1.0 if p.step_time_error is None else abs(p.step_time_error) for p in predictions]
    if not errors:
        return []
    return [Bar(name, f"within {within:.0%}", f"{max(errors):.1%} at worst", max(errors) <= within)]


def _prefetch_gain(paper: Sequence[Prediction]) -> list[Bar]:
    """The gain of backward prefetch in per cent of the throughput without it, predicted against published."""
    off = {p.case.gpus: p for p in paper if p.case.settings.get("backward_prefetch") == "none"}
    on = {p.case.gpus: p for p in paper if p.case.gpus in off and p not in off.values() and _batch(p) == 1}
    gaps = []
    for gpus, without in off.items():
        values = [p.predicted(Figure.HARDWARE_TFLOPS) for p in (on[gpus], without)] if gpus in on else []
        if not values or None in values:
            continue
        predicted = 100 * (values[0] / values[1] - 1)  # type: ignore[operator]
        one, other = (p.case.published[Figure.HARDWARE_TFLOPS] for p in (on[gpus], without))
        published = 100 * (one / other - 1)
        gaps.append((abs(predicted - published), predicted, published))
    if not gaps:
        return []
    worst, predicted, published = max(gaps)
    wanted = f"within {PREFETCH_GAIN_POINTS:g} points"
    reached = f"{worst:.1f} points at worst ({predicted:.1f} % where {published:.1f} % was measured)"
    return [Bar("Fig 6b, gain of backward prefetch", wanted, reached, worst <= PREFETCH_GAIN_POINTS)]


def _collapse(paper: Sequence[Prediction]) -> list[Bar]:
    plateau = [
        value
        for p in paper
        if _batch(p) == 2 and not p.case.collapsed
        if (value := p.predicted(Figure.HARDWARE_TFLOPS)) is not None
    ]
    fallen = [p for p in paper if p.case.collapsed]
    if not plateau or not fallen:
        return []
    value = fallen[0].predicted(Figure.HARDWARE_TFLOPS)
    retries = fallen[0].result.alloc_retries_per_step
    share = None if value is None else value / statistics.fmean(plateau)
    low, high = COLLAPSE_SHARE
    reached = "did not finish" if share is None else f"{share:.0%} with {retries:g} retries a step"
    wanted, met = f"retries, {low:.0%} to {high:.0%} of the plateau", low <= (share or 0.0) <= high
    return [Bar("Fig 7b, collapse at 128 GPUs and batch 2", wanted, reached, met and bool(retries))]


def _memory(paper: Sequence[Prediction]) -> list[Bar]:
    bars = []
    for figure, allowed in ((Figure.ALLOCATED, ALLOCATED_GB), (Figure.RESERVED, RESERVED_GB)):
        gaps = [
            (abs(value - p.case.published[figure]), p.case.name)
            for p in paper
            if figure in p.case.published and (value := p.predicted(figure)) is not None
        ]
        if gaps:
            worst, name = max(gaps)
            reached = f"{worst:.1f} GB at worst ({name})"
            bars.append(Bar(f"Fig 8b, {figure.words}", f"within {allowed:g} GB", reached, worst <= allowed))
    return bars


def _batch(prediction: Prediction) -> object:
    return prediction.case.settings["batch"]
