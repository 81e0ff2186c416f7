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
    bars = [*_step_times(predictions)]
    paper = [p for p in predictions if p.case.model == "gpt-175b" and not p.case.assumed]
    if paper:
        bars += [*_plateau(paper), *_prefetch_gain(paper), *_collapse(paper), *_memory(paper)]
    bars += _t5([p for p in predictions if p.case.group == _T5_GROUP])
    return bars


def group_errors(predictions: Iterable[Prediction]) -> dict[str, list[float]]:
    """Step-time errors of the cases that count, by group; a case that did not finish is an error of 1."""
    groups: dict[str, list[float]] = {}
    for prediction in predictions:
        if prediction.speed is None or prediction.case.assumed or prediction.case.collapsed:
            continue
        error = prediction.step_time_error
        groups.setdefault(prediction.case.group, []).append(1.0 if error is None else error)
    return groups


def _step_times(predictions: Sequence[Prediction]) -> list[Bar]:
    errors = [abs(error) for group in group_errors(predictions).values() for error in group]
    if not errors:
        return []
    mean, worst = statistics.fmean(errors), max(errors)
    over = sum(error > WORST_STEP_TIME for error in errors)
    return [
        Bar("step time, mean error", f"at most {MEAN_STEP_TIME:.0%}", f"{mean:.1%}", mean <= MEAN_STEP_TIME),
        Bar(
            "step time, worst error",
            f"at most {WORST_STEP_TIME:.0%}",
            f"{worst:.1%} ({over} of {len(errors)} cases over {WORST_STEP_TIME:.0%})",
            not over,
        ),
    ]


def _plateau(paper: Sequence[Prediction]) -> list[Bar]:
    errors = [
        p.step_time_error
        for p in paper
        if not p.case.collapsed and p.case.settings.get("backward_prefetch") != "none"
    ]
    worst = max((1.0 if error is None else abs(error) for error in errors), default=None)
    if worst is None:
        return []
    return [Bar("Fig 7b, plateau", f"within {PLATEAU:.0%}", f"{worst:.1%} at worst", worst <= PLATEAU)]


def _t5(paper: Sequence[Prediction]) -> list[Bar]:
    if not paper:
        return []
    errors = [p.step_time_error for p in paper]
    worst = max(1.0 if error is None else abs(error) for error in errors)
    return [Bar("Fig 7c, T5-11B", f"within {T5:.0%}", f"{worst:.1%} at worst", worst <= T5)]


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
        published = 100 * (
            on[gpus].case.published[Figure.HARDWARE_TFLOPS] / without.case.published[Figure.HARDWARE_TFLOPS]
            - 1
        )
        gaps.append((abs(predicted - published), predicted, published))
    if not gaps:
        return []
    worst, predicted, published = max(gaps)
    return [
        Bar(
            "Fig 6b, gain of backward prefetch",
            f"within {PREFETCH_GAIN_POINTS:g} points",
            f"{worst:.1f} points at worst ({predicted:.1f} % where {published:.1f} % was measured)",
            worst <= PREFETCH_GAIN_POINTS,
        )
    ]


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
    return [
        Bar(
            "Fig 7b, collapse at 128 GPUs and batch 2",
            f"retries, {low:.0%} to {high:.0%} of the plateau",
            reached,
            share is not None and low <= share <= high and bool(retries),
        )
    ]


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
            bars.append(
                Bar(
                    f"Fig 8b, {figure.words}",
                    f"within {allowed:g} GB",
                    f"{worst:.1f} GB at worst ({name})",
                    worst <= allowed,
                )
            )
    return bars


def _batch(prediction: Prediction) -> object:
    return prediction.case.settings["batch"]
