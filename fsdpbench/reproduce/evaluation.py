"""The evaluation of the FSDP paper: figures 6 to 8 (arXiv 2304.11277; PVLDB 16:12)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fsdpbench.reproduce import open_settings
from fsdpbench.reproduce.building import CaseOf, Maker, at_least, at_most, points_of, ran_out, ratio
from fsdpbench.reproduce.figure import Contrast, Drawing, Lookup, PaperFigure, Place
from fsdpbench.validation.runs.case import Case, Figure
from fsdpbench.validation.runs.published import published


def _sharding(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("6a")
    full, hybrid, replicated, ddp = figure.series
    small, medium, large = figure.x
    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, lambda way, model: cases[f"{model}, {way}"], Figure.HARDWARE_TFLOPS),
        variants=open_settings.of_sharding(folder),
        claims=(
            at_least(
                f"{large} runs out of memory replicated and under DDP (of 2 runs)",
                ran_out((replicated, large), (ddp, large)),
                2,
                "",
            ),
            *(
                at_least(
                    f"{model}: full sharding over replication",
                    ratio((full, model), (replicated, model)),
                    0.995,
                )
                for model in (small, medium)
            ),
            at_most(f"{large}: full over hybrid sharding", ratio((full, large), (hybrid, large)), 1.05),
            at_least(f"{medium} over {small}, full sharding", ratio((full, medium), (full, small)), 1.5),
        ),
    )


def _prefetch(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("6b")
    on, off = figure.series
    names = {on: "", off: ", no backward prefetch"}

    def case(series: str, gpus: Place) -> Case:
        return cases[f"GPT-175B, {gpus} GPUs, batch 1{names[series]}"]

    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, case, Figure.HARDWARE_TFLOPS),
        claims=tuple(
            at_least(f"{gpus} GPUs: with over without prefetch", ratio((on, gpus), (off, gpus)), 1.1)
            for gpus in figure.x
        ),
        contrasts=(Contrast({"with backward prefetch": case(on, 128), "without": case(off, 128)}),),
        x_title="GPUs",
    )


def _limiter(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("6c")
    batch = dict(zip(figure.x, figure.batch, strict=True))
    on, off = figure.series

    def case(series: str, place: Place) -> Case:
        return cases[f"{place}, batch {batch[place]}, {series}"]

    def of(family: str) -> list[Place]:
        return [place for place in figure.x if str(place).startswith(family)]

    return PaperFigure(
        about=figure,
        drawing=Drawing.BARS,
        points=points_of(figure, case, Figure.SECONDS),
        variants=open_settings.of_limiter(folder),
        claims=(
            *(
                at_least(f"{place}: without over with the limiter", ratio((off, place), (on, place)), 1.5)
                for place in of("t5")
            ),
            *(
                at_most(f"{place}: without over with the limiter", ratio((off, place), (on, place)), 1.03)
                for place in of("regnet")
            ),
            *(
                at_least(f"{place}: with over without the limiter", ratio((on, place), (off, place)), 1.02)
                for place in of("deepvit")
            ),
        ),
        contrasts=(
            Contrast(
                {"limiter on": case(on, of("t5")[0]), "limiter off": case(off, of("t5")[0])}, memory=True
            ),
        ),
    )


def _dhen_speed(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("7a")
    raf, nraf, hybrid, _ = figure.series
    first, last = figure.x[0], figure.x[-1]
    case = _dhen(cases)
    return PaperFigure(
        about=figure,
        drawing=Drawing.LINES,
        points=points_of(figure, case, Figure.SAMPLES),
        variants=open_settings.of_dhen(folder),
        claims=(
            *(
                at_least(
                    f"{gpus} GPUs: NRAF over RAF, full sharding", ratio((nraf, gpus), (raf, gpus)), 1.005
                )
                for gpus in (first, last)
            ),
            at_least(
                f"{last} GPUs: hybrid over full sharding, RAF", ratio((hybrid, last), (raf, last)), 1.005
            ),
            at_most(f"{last} over {first} GPUs, {raf}", ratio((raf, last), (raf, first)), 0.9),
        ),
        contrasts=(Contrast({raf: case(raf, last), hybrid: case(hybrid, last)}),),
        x_title="GPUs",
        log_x=True,
    )


def _gpt_speed(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("7b")
    small, large = figure.series
    crowded, roomy, _, _, last = figure.x

    def case(batch: str, gpus: Place) -> Case:
        return cases[f"GPT-175B, {gpus} GPUs, {batch}"]

    return PaperFigure(
        about=figure,
        drawing=Drawing.LINES,
        points=points_of(figure, case, Figure.HARDWARE_TFLOPS),
        claims=(
            at_most(f"{large}: {crowded} over {roomy} GPUs", ratio((large, crowded), (large, roomy)), 0.65),
            at_least(f"{large}: {last} over {roomy} GPUs", ratio((large, last), (large, roomy)), 0.97),
            at_least(f"{large} over {small}, {roomy} GPUs", ratio((large, roomy), (small, roomy)), 1.03),
        ),
        contrasts=(
            Contrast(
                {f"{large}, {gpus} GPUs": case(large, gpus) for gpus in (crowded, roomy)},
                memory=True,
            ),
        ),
        x_title="GPUs",
        log_x=True,
    )


def _t5_speed(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("7c")
    small, large = figure.series
    first, last = figure.x[0], figure.x[-1]
    return PaperFigure(
        about=figure,
        drawing=Drawing.LINES,
        points=points_of(figure, _t5(cases), Figure.HARDWARE_TFLOPS),
        claims=(
            at_least(f"{small}: {last} over {first} GPUs", ratio((small, last), (small, first)), 0.9),
            at_least(f"{large} over {small}, {last} GPUs", ratio((large, last), (small, last)), 1.01),
        ),
        x_title="GPUs",
        log_x=True,
    )


def _dhen_memory(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("8a")
    raf, nraf = figure.series
    first, last = figure.x[0], figure.x[-1]
    return PaperFigure(
        about=figure,
        drawing=Drawing.LINES,
        points=points_of(figure, _dhen(cases), Figure.RESERVED),
        variants=open_settings.of_dhen(folder),
        claims=(
            at_most(f"{last} over {first} GPUs, {raf}", ratio((raf, last), (raf, first)), 0.5),
            at_least(f"NRAF over RAF, {last} GPUs", ratio((nraf, last), (raf, last)), 1.01),
            at_most(f"NRAF over RAF, {first} GPUs", ratio((nraf, first), (raf, first)), 1.1),
        ),
        x_title="GPUs",
        log_x=True,
    )


def _gpt_memory(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("8b")
    first, last = figure.x[0], figure.x[-1]
    held, full = "batch 1, allocated", "batch 2, reserved"

    def case(series: str, gpus: Place) -> Case:
        return cases[f"GPT-175B, {gpus} GPUs, {series.partition(',')[0]}"]

    return PaperFigure(
        about=figure,
        drawing=Drawing.LINES,
        points=points_of(figure, case, _kind_of_memory),
        claims=(
            at_least(f"{full}, {first} GPUs", lambda value: value(full, first), 78, "GB"),
            at_most(f"{held}: {last} over {first} GPUs", ratio((held, last), (held, first)), 0.75),
        ),
        x_title="GPUs",
        log_x=True,
    )


def _t5_memory(cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    figure = published("8c")
    first, last = figure.x[0], figure.x[-1]
    small, large = "batch 8, allocated", "batch 16, allocated"

    def fall(value: Lookup) -> float | None:
        before, after = value(small, first), value(small, last)
        return None if before is None or after is None else before - after

    return PaperFigure(
        about=figure,
        drawing=Drawing.LINES,
        points=points_of(figure, _t5(cases), _kind_of_memory),
        claims=(
            at_most(f"{small}: {first} less {last} GPUs", fall, 10, "GB"),
            at_least(f"{large} over batch 8, {last} GPUs", ratio((large, last), (small, last)), 1.5),
        ),
        x_title="GPUs",
        log_x=True,
    )


def _dhen(cases: Mapping[str, Case]) -> CaseOf:
    return lambda way, gpus: cases[f"DHEN, {gpus} GPUs, {way}"]


def _t5(cases: Mapping[str, Case]) -> CaseOf:
    return lambda series, gpus: cases[f"T5-11B, {gpus} GPUs, {series.partition(',')[0]}"]


def _kind_of_memory(series: str) -> Figure:
    return Figure[series.rpartition(", ")[2].upper()]


MAKERS: Mapping[str, Maker] = {
    "6a": _sharding,
    "6b": _prefetch,
    "6c": _limiter,
    "7a": _dhen_speed,
    "7b": _gpt_speed,
    "7c": _t5_speed,
    "8a": _dhen_memory,
    "8b": _gpt_memory,
    "8c": _t5_memory,
}
"""Each figure from the validation's cases by name; profiles of other machines are written to the folder."""
