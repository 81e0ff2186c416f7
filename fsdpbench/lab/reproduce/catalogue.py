"""All figures of `fsdpbench reproduce fsdp-paper`, in the order of the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdpbench.lab.reproduce import evaluation, open_settings
from fsdpbench.lab.reproduce.building import Maker, points_of
from fsdpbench.lab.reproduce.claims import Place, ratio, retries
from fsdpbench.lab.reproduce.evaluation import as_stated
from fsdpbench.lab.reproduce.figure import Contrast, Drawing, PaperFigure
from fsdpbench.lab.validation.paper_network import Prediction, network_predictions
from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.lab.validation.runs.paper import PublishedFigure, known_cases, published

_OF_2022 = "a100-40gb"
"""All runs of the announcement were on such GPUs."""
_FACTOR = "the factor of uneven inputs was read off it"


def figures(folder: Path, only: Sequence[str] = ()) -> list[PaperFigure]:
    """The figures named in `only` (none: all); profiles of machines that variants need go to `folder`."""
    known = {case.name: case for case in known_cases("gpt", "t5", "open")}
    cases = as_stated(known)
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
    """Return the network model's answer to figure 2."""
    return {each.case.name: each for each in network_predictions()}


def _inputs(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure, ready = published("2a"), _ready()
    (way,) = figure.series
    one, copied, *uneven = figure.x
    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, lambda _, x: ready[f"all-gather {x}"].case, Figure.MILLISECONDS),
        variants=open_settings.of_network(),
        claims=(
            ratio(f"{copied} over {one}", (way, copied), (way, one)),
            *(ratio(f"{x} over {one}", (way, x), (way, one), taken=_FACTOR) for x in uneven),
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
            ratio("16 pieces over one", (total, 16), (total, 1)),
            ratio(f"{last} pieces over one", (total, last), (total, 1)),
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
    smaller, larger, spread = figure.x
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
        claims=(
            ratio(f"{larger} over {smaller}", (series, larger), (series, smaller)),
            ratio(f"{spread} over {larger}", (series, spread), (series, larger)),
        ),
    )


def _issue(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("104509")
    step, counted = figure.series
    on, off = figure.x
    kinds = {step: Figure.SECONDS, counted: Figure.RETRIES}
    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, lambda _, way: cases[f"7B GPT, 16 GPUs, batch 8, {way}"], kinds.__getitem__),
        variants=open_settings.of_issue(),
        claims=(
            ratio(f"step: {off} over {on}", (step, off), (step, on)),
            *(retries(f"retries, {limiter}", (counted, limiter)) for limiter in figure.x),
        ),
    )


PUBLICATION = "fsdp-paper"
NAMES = ("2a", "2b", "5", "6a", "6b", "6c", "7a", "7b", "7c", "8a", "8b", "8c", "2022", "104509")
"""What `--only` takes: the paper's figures, the runs of PyTorch 1.11's announcement, an issue of PyTorch."""
