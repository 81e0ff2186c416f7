"""Predictions of published runs as residuals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdpbench.results.residuals.table import Condition, Quantity, Residual
from fsdpbench.sim.hardware.profile import load_profile
from fsdpbench.sim.software import CURRENT
from fsdpbench.validation.predict import Prediction
from fsdpbench.validation.runs.case import Case, Figure
from fsdpbench.workloads import get_workload

MEMORY = {
    Figure.ALLOCATED: Quantity.ALLOCATED,
    Figure.ACTIVE: Quantity.ACTIVE,
    Figure.RESERVED: Quantity.RESERVED,
}


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
    case, config = prediction.case, prediction.result["config"]
    slower = predicted / published if figure.is_speed else published / predicted
    return Residual(
        condition=condition,
        source=case.source,
        chip=chip_of(case),
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
        retries=float(prediction.result.get("alloc_retries_per_step") or 0.0),
        full=_share_of_memory(prediction),
        quantity=Quantity.TIME if figure.is_time else MEMORY[figure],
        unit=figure.words,
        published=published,
        predicted=predicted,
        log_ratio=math.log(slower),
    )


def chip_of(case: Case) -> str:
    """The packaged profile of the run's chip."""
    return case.chip or case.hardware


def _share_of_memory(prediction: Prediction) -> float:
    reserved = (prediction.result.get("peak_memory_bytes") or {}).get("reserved") or 0
    return float(reserved / load_profile(prediction.result["config"]["hardware"]).usable_memory_bytes)
