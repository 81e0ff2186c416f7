"""All figures of `fsdpbench reproduce fsdp-paper`, in the order of the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdpbench.reproduce import evaluation, open_settings
from fsdpbench.reproduce.building import Maker, at_least, at_most, points_of, ratio
from fsdpbench.reproduce.figure import Contrast, Drawing, PaperFigure, Place
from fsdpbench.reproduce.names import NAMES
from fsdpbench.validation.paper_network import network_predictions
from fsdpbench.validation.predict import Prediction
from fsdpbench.validation.runs.case import Case, Figure
from fsdpbench.validation.runs.paper import paper_cases
from fsdpbench.validation.runs.paper_open import open_cases
from fsdpbench.validation.runs.paper_t5 import t5_cases
from fsdpbench.validation.runs.published import PublishedFigure, published

_OF_2022 = "a100-40gb"
"""All runs of the announcement were on such GPUs."""


def figures(folder: Path, only: Sequence[str] = ()) -> list[PaperFigure]:
    """The figures named in `only` (none: all); profiles of machines that variants need go to `folder`."""
    cases = {case.name: case for case in (*paper_cases(), *t5_cases(), *open_cases())}
    makers: dict[str, Maker] = {
        "2a": _inputs,
        "2b": _pieces,
        "5": _overlap,
        **evaluation.MAKERS,
        "2022": _announcement,
        "104509": _issue,
    }
    return [makers[name](cases, folder) for name in NAMES if not only or name in only]


def _ready() -> dict[str, Prediction]:
    """What the network model says of figure 2."""
    return {each.case.name: each for each in network_predictions()}


def _inputs(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure, ready = published("2a"), _ready()
    (way,) = figure.series
    one = figure.x[0]
    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, lambda _, x: ready[f"all-gather {x}"].case, Figure.MILLISECONDS),
        variants=open_settings.of_network(),
        claims=tuple(
            at_least(f"{x} over {one}", ratio((way, x), (way, one)), least)
            for x, least in zip(figure.x[1:], (1.03, 1.05, 1.05), strict=True)
        ),
        ready=ready,
    )


def _pieces(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure, ready = published("2b"), _ready()
    (total,) = figure.series
    last = figure.x[-1]
    return PaperFigure(
        about=figure,
        drawing=Drawing.LINES,
        points=points_of(figure, lambda _, n: ready[f"all-gather in {n} pieces"].case, Figure.MILLISECONDS),
        variants=open_settings.of_network(),
        claims=(
            at_most("16 pieces over one", ratio((total, 16), (total, 1)), 1.1),
            at_least(f"{last} pieces over one", ratio((total, last), (total, 1)), 2.0),
        ),
        x_title="pieces of 2^30 elements in all",
        log_x=True,
        ready=ready,
    )


def _overlap(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    on = cases["GPT-175B, 128 GPUs, batch 1"]
    off = cases[f"{on.name}, no backward prefetch"]
    return PaperFigure(
        about=PublishedFigure("5", "arXiv 2304.11277, Fig 5 (a drawing without figures)", "", "", (), {}),
        drawing=Drawing.LINES,
        contrasts=(
            Contrast({"forward": on}, window=0.12),
            Contrast({"backward, prefetching": on, "backward, not prefetching": off}),
        ),
    )


def _announcement(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("2022")
    (series,) = figure.series
    smaller, larger, _ = figure.x
    as_stated: dict[str, Case] = {}

    def case(_: str, place: Place) -> Case:
        stated = next(case for name, case in cases.items() if name.startswith(f"{place}, batch"))
        as_stated[stated.name] = dataclasses.replace(stated, hardware=_OF_2022)
        return open_settings.ROOMY.on(as_stated[stated.name], folder)

    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, case, Figure.HARDWARE_TFLOPS),
        variants=open_settings.of_announcement(as_stated),
        claims=(at_most(f"{larger} over {smaller}", ratio((series, larger), (series, smaller)), 0.8),),
    )


def _issue(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("104509")
    step, retries = figure.series
    on, off = figure.x
    kinds = {step: Figure.SECONDS, retries: Figure.RETRIES}
    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, lambda _, way: cases[f"7B GPT, 16 GPUs, batch 8, {way}"], kinds.__getitem__),
        variants=open_settings.of_issue(),
        claims=(
            at_least(f"{off} over {on}", ratio((step, off), (step, on)), 1.2),
            at_most(f"retries, {on}", lambda value: value(retries, on), 0, "retries"),
            at_least(f"retries, {off}", lambda value: value(retries, off), 1, "retries"),
        ),
    )
