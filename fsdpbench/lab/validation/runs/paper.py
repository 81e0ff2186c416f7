"""The FSDP paper's runs of minGPT-175B (arXiv 2304.11277; PVLDB 16:12), figures 6b, 7b and 8b.

Its setup: 8 A100-80GB a host, 2 Tb/s RoCE, full sharding, backward prefetch, two all-gathers in flight,
activation checkpointing, BF16, Adam, sequences of 2048 tokens; minGPT writes its attention out, with dropout
of 0.1. TFLOPS are taken as counted with recompute.
"""

from __future__ import annotations

from fsdpbench.base.settings import Value
from fsdpbench.lab.validation.runs.case import Case, Figure
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

_SOURCE = "arXiv 2304.11277"
_HARDWARE = "a100-80gb-roce2000"

_MEMORY = {"allocated": Figure.ALLOCATED, "active": Figure.ACTIVE, "reserved": Figure.RESERVED}


def paper_cases() -> list[Case]:
    """The runs of minGPT-175B with all that was published of them."""
    speeds, memory = published("7b"), published("8b")
    cases = []
    for batch in (1, 2):
        for gpus, tflops in speeds.along(f"batch {batch}").items():
            peaks = {
                figure: value
                for kind, figure in _MEMORY.items()
                if (value := memory.at(f"batch {batch}, {kind}", gpus)) is not None
            }
            cases.append(
                _case(
                    f"GPT-175B, {gpus} GPUs, batch {batch}",
                    "FSDP paper, Fig 7b and 8b",
                    int(gpus),
                    {"batch": batch},
                    {Figure.HARDWARE_TFLOPS: tflops, **peaks},
                    collapsed=(gpus, batch) == (128, 2),
                )
            )
    for gpus, tflops in published("6b").along("no backward prefetch").items():
        cases.append(
            _case(
                f"GPT-175B, {gpus} GPUs, batch 1, no backward prefetch",
                "FSDP paper, Fig 6b",
                int(gpus),
                {"batch": 1, "backward_prefetch": "none"},
                {Figure.HARDWARE_TFLOPS: tflops},
            )
        )
    return cases


def _case(
    name: str,
    group: str,
    gpus: int,
    settings: dict[str, Value],
    figures: dict[Figure, float],
    collapsed: bool = False,
) -> Case:
    return Case(
        name=name,
        group=group,
        source=_SOURCE,
        model="gpt-175b",
        system="torch-fsdp1-1.13",
        shape={"attention": "explicit", "dropout": 0.1},
        hardware=_HARDWARE,
        gpus=gpus,
        settings={
            "seq": 2048,
            "activation_checkpointing": "full",
            "limit_all_gathers": 2,
            "param_dtype": "bf16",
            "reduce_dtype": "bf16",
            # PyTorch of 2022: Adam parameter by parameter, gradients kept and filled with zeros.
            "optimizer": "adamw-loop",
            "zero_grad": "fill",
            **settings,
        },
        published=figures,
        collapsed=collapsed,
    )


FILE = "fsdp_paper.toml"
_RAN_OUT = "out of memory"
_ABOUT = ("source", "read", "unit", "x", "batch")


@dataclass(frozen=True)
class PublishedFigure:
    """One figure of a publication: a value of each series at each place of its axis.

    `read`: T stated in the text, B printed on a bar, D read off an image (within the brackets).
    `batch`: samples a GPU at each place, where the figure names them there. A value of None: out of memory.
    """

    name: str
    source: str
    read: str
    unit: str
    x: tuple[int | str, ...]
    series: Mapping[str, tuple[float | None, ...]]
    batch: tuple[int, ...] = ()

    @property
    def read_within(self) -> float:
        """How far a value that was read off an image may be from the true one, in its unit; 0 if it was printed."""
        within = re.search(r"\(([0-9.]+)", self.read)
        return float(within[1]) if within else 0.0

    def at(self, series: str, x: int | str) -> float | None:
        """The value of `series` at `x`; None: the run was out of memory. Raises `KeyError`, `ValueError`."""
        return self.series[series][self.x.index(x)]

    def along(self, series: str) -> dict[int | str, float]:
        """The values of `series` that there are, by place."""
        found = zip(self.x, self.series[series], strict=True)
        return {x: value for x, value in found if value is not None}


@functools.cache
def published_figures() -> Mapping[str, PublishedFigure]:
    """All figures by name (`2a`, `6b`, ...), in the order of the file."""
    tables = tomllib.loads(resources.files("fsdpbench.lab.validation").joinpath(FILE).read_text("utf-8"))
    return {name: _figure(name, table) for name, table in tables.items()}


def published(name: str) -> PublishedFigure:
    """The figure of that name. Raises `KeyError`."""
    return published_figures()[name]


def _figure(name: str, table: dict[str, Any]) -> PublishedFigure:
    series = {
        key: tuple(None if value == _RAN_OUT else float(value) for value in values)
        for key, values in table.items()
        if key not in _ABOUT
    }
    return PublishedFigure(
        name=name,
        source=table["source"],
        read=table["read"],
        unit=table["unit"],
        x=tuple(table["x"]),
        series=series,
        batch=tuple(table.get("batch", ())),
    )
