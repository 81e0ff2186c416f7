"""Residuals of published runs, predicted as they were and as if something about them were not known.

What a chip, a network or a software without published runs adds to the error of a prediction is measured on
runs that have been published, by predicting them without what is known of it:

    KNOWN      as they were
    NEW_CHIP   as they were, on chips to which no key was fitted
    CHIP       the keys that were fitted to runs on their chip come from another chip (`held_out_cases`)
    NETWORK    the packaged profile's network instead of the one that was stated
    SYSTEM     PyTorch's FSDP2 instead of its FSDP1, and FSDP1 instead of FSDP2
    SOFTWARE   today's software instead of that of their time
    MODEL      runs of models whose shape or settings had to be assumed
    SETTING    runs with tensor parallelism, fp8 or LoRA, as they were (`[[settings]]` of published_runs.toml)
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.results.residuals.widths import TABLE, Condition, Quantity, Residual
from fsdpbench.lab.validation.coverage import MEMORY, held_out_cases
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Case, Figure, Network
from fsdpbench.sim.model.profile import load_profile, stated_machine
from fsdpbench.sim.model.software import CURRENT, load_software
from fsdpbench.systems import get_system
from fsdpbench.workloads import get_workload

_TODAYS = "torch-fsdp1"
_OTHER = {"torch-fsdp1": "torch-fsdp2", "torch-fsdp2": "torch-fsdp1"}
_RUNS_OF_SETTINGS = ("tensor parallelism", "fp8", "LoRA")
_RUN_OF_MODELS = ("FSDP paper, Fig 6a", "FSDP paper, Fig 6c", "FSDP paper, Fig 7a and 8a", "pytorch#104509")


def under(
    condition: Condition, cases: Sequence[Case], open_cases: Sequence[Case], folder: Path
) -> list[Case]:
    """The cases that `condition` changes, changed; profiles are written to `folder`.

    Compiled runs are predicted as they were alone: no interval rests on them in another condition.
    """
    if condition is Condition.SETTING:
        return [case for case in open_cases if case.group in _RUNS_OF_SETTINGS]
    foreign = [case for case in cases if "gemm.weight_grad" in load_profile(case.profile).estimated]
    cases = [case for case in cases if case not in foreign]
    if condition in (Condition.KNOWN, Condition.NEW_CHIP):
        return cases if condition is Condition.KNOWN else foreign
    cases = [case for case in cases if not case.settings.get("compile")]
    if condition is Condition.CHIP:
        return held_out_cases(cases, folder)
    if condition is Condition.NETWORK:
        return [
            dataclasses.replace(
                case, hardware=stated_machine(case.chip, load_profile(case.hardware).gpus_per_node)
            )
            for case in cases
            if case.chip and case.network is Network.STATED
        ]
    if condition is Condition.SYSTEM:
        return [
            dataclasses.replace(
                case, system=_OTHER[case.system], software=_on_one_stream(case.software, folder)
            )
            for case in cases
            if case.system in _OTHER
        ]
    if condition is Condition.SOFTWARE:
        return [
            dataclasses.replace(case, system=case.system if case.system in _OTHER else _TODAYS, software=None)
            for case in cases
            if case.software or get_system(case.system).software != CURRENT
        ]
    return [case for case in open_cases if case.group in _RUN_OF_MODELS]


def _on_one_stream(software: str | None, folder: Path) -> str | None:
    """`software` with collectives where the installed torch has them, as FSDP2 needs."""
    if software is None or not load_software(software).collectives.own_streams:
        return software
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{software}-one-stream.toml").resolve()
    head = {"base": software, "name": path.stem}
    write_whole(path, to_toml({**head, "collectives": {"own_streams": False}}))
    return str(path)


def residuals_of(condition: Condition, predictions: Iterable[Prediction]) -> Iterator[Residual]:
    """A residual for every published time and memory whose simulation finished."""
    for prediction in predictions:
        for figure, published in prediction.case.published.items():
            predicted = prediction.predicted(figure)
            if not predicted or not published or not (figure.is_time or figure in MEMORY):
                continue
            yield _residual(condition, prediction, figure, published, predicted)


def _residual(
    condition: Condition, prediction: Prediction, figure: Figure, published: float, predicted: float
) -> Residual:
    case, config = prediction.case, prediction.result.config or {}
    slower = predicted / published if figure.is_speed else published / predicted
    return Residual(
        condition=condition,
        source=case.source,
        chip=case.profile,
        run=case.name,
        model=" ".join([case.model, *(f"{name}={value}" for name, value in case.shape.items())]),
        family=get_workload(case.model, shape=dict(case.shape) or None).family,
        system=config["system"],
        software=Path(config.get("software") or CURRENT).name.removesuffix(".toml"),
        fitted=case.fitted,
        compiled=bool(config["settings"].get("compile")),
        gpus=config["gpus"],
        nodes=-(-config["gpus"] // (config.get("gpus_used_per_node") or config["gpus_per_node"])),
        network=case.network.value,
        retries=prediction.result.alloc_retries_per_step or 0.0,
        full=_share_of_memory(prediction),
        network_share=prediction.result.network_share or 0.0,
        quantity=Quantity.TIME if figure.is_time else MEMORY[figure],
        unit=figure.words,
        published=published,
        predicted=predicted,
        log_ratio=math.log(slower),
    )


def _share_of_memory(prediction: Prediction) -> float:
    reserved = prediction.result.reserved or 0
    return float(reserved / load_profile(prediction.result.stored("config.hardware")).usable_memory_bytes)


def write_table(residuals: Iterable[Residual], path: Path = TABLE) -> None:
    """Write one line for each residual."""
    names = [spec.name for spec in dataclasses.fields(Residual)]
    text = io.StringIO(newline="")
    rows = ([_shown(getattr(residual, name)) for name in names] for residual in residuals)
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    write_whole(path, text.getvalue())


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else value
