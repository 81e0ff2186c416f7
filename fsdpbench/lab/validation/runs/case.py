"""A published run: everything needed to simulate it, and its measured figures.

Runs of PyTorch's FSDP are in two TOML files beside this folder: `fsdp_paper.toml` has the values,
`published_runs.toml` the settings of each run and references to its values.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import resources
from typing import Any

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.settings import Value

_FIGURES, _RUNS = "fsdp_paper.toml", "published_runs.toml"
_RAN_OUT = "out of memory"
_ABOUT = ("source", "read", "unit", "x", "batch")


class Figure(Enum):
    """A figure in publications: its path in a result, and its unit in tables."""

    TOKENS = ("tokens_per_s_per_gpu", "tokens/s/GPU", 1.0)
    HARDWARE_TFLOPS = ("hardware_tflops_per_gpu", "TFLOPS/GPU (with recompute)", 1.0)
    SAMPLES = ("samples_per_s_per_gpu", "samples/s/GPU", 1.0)
    SECONDS = ("step_time_s", "s a step", 1.0)
    MILLISECONDS = ("step_time_s", "ms", 1e-3)
    RETRIES = ("alloc_retries_per_step", "alloc retries a step", 1.0)
    ALLOCATED = ("peak_memory_bytes.allocated", "GB allocated", 1e9)
    ACTIVE = ("peak_memory_bytes.active", "GB active", 1e9)
    RESERVED = ("peak_memory_bytes.reserved", "GB reserved", 1e9)

    @property
    def path(self) -> list[str]:
        return self.value[0].split(".")

    @property
    def words(self) -> str:
        return self.value[1]

    @property
    def unit(self) -> float:
        """Return the size of the published unit in the result's unit."""
        return self.value[2]

    @property
    def is_speed(self) -> bool:
        """Return whether a larger value means a shorter step."""
        return self in (Figure.TOKENS, Figure.HARDWARE_TFLOPS, Figure.SAMPLES)

    @property
    def is_time(self) -> bool:
        """Return whether the figure determines the step time."""
        return self.is_speed or self in (Figure.SECONDS, Figure.MILLISECONDS)


_FITTED = frozenset({"llm-foundry"})


class Network(Enum):
    """The information in a publication about the network between nodes."""

    STATED = "stated"
    ONE_NODE = "one node"
    NOT_STATED = "not stated"


@dataclass(frozen=True)
class Case:
    """One published run. `assumed` names what the publication leaves out; such a case has no target."""

    name: str
    group: str
    source: str
    model: str
    hardware: str
    gpus: int
    settings: Mapping[str, Value]
    published: Mapping[Figure, float]
    system: str = "torch-fsdp1"
    """The system with the software of that time."""
    shape: Mapping[str, ShapeValue] = field(default_factory=dict)
    assumed: str = ""
    collapsed: bool = False
    """Memory was full and the run slow: it has its own target, and is not part of averages."""
    software: str | None = None
    """A software profile that replaces the system's own."""
    chip: str = ""
    """The profile of the chip, if `hardware` is a file based on it."""
    network: Network = Network.STATED
    ran_out: bool = False
    """The run was out of memory; nothing else was published about it."""
    chosen: bool = False
    """A setting that is unpublished, or published otherwise, was chosen so that the run comes out right. Its
    error says nothing about unknown runs."""
    open: bool = False
    """Shape or settings that matter are not published: the run is shown, but its error does not count."""

    @property
    def profile(self) -> str:
        """Return the packaged profile of the run's chip."""
        return self.chip or self.hardware

    @property
    def compiled(self) -> bool:
        """Return whether the run is compiled."""
        return bool(self.settings.get("compile"))

    @property
    def how(self) -> str:
        """Return `compiled` or `eager`."""
        return "compiled" if self.compiled else "eager"

    @property
    def fitted(self) -> bool:
        """Return whether constants were fitted to its source (docs/simulator.md), or it chose a setting."""
        return self.chosen or self.source in _FITTED


@dataclass(frozen=True)
class PublishedFigure:
    """One figure of a publication: a value of each series at each place of its axis.

    `read`: T stated in the text, B printed on a bar, D read off an image (error in brackets).
    `batch`: samples per GPU at each place, if the figure gives them. A value of None: out of memory.
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
        """Return the largest error of a value read off an image, in its unit; 0 if it was printed."""
        within = re.search(r"\(([0-9.]+)", self.read)
        return float(within[1]) if within else 0.0

    def at(self, series: str, x: int | str) -> float | None:
        """Return the value of `series` at `x`; None: out of memory. Raises `KeyError`, `ValueError`."""
        return self.series[series][self.x.index(x)]

    def along(self, series: str) -> dict[int | str, float]:
        """Return the values of `series` by place, without missing ones."""
        found = zip(self.x, self.series[series], strict=True)
        return {x: value for x, value in found if value is not None}


@functools.cache
def published_figures() -> Mapping[str, PublishedFigure]:
    """Return all figures by name (`2a`, `6b`, ...), in the order of the file."""
    return {name: _figure(name, table) for name, table in _tables(_FIGURES).items()}


def published(name: str) -> PublishedFigure:
    """Return the figure called `name`. Raises `KeyError`."""
    return published_figures()[name]


def _figure(name: str, table: JsonObject) -> PublishedFigure:
    series = {
        key: tuple(None if value == _RAN_OUT else float(value) for value in values)
        for key, values in table.items()
        if key not in _ABOUT
    }
    about: JsonObject = {
        key: tuple(at) if isinstance(at, list) else at for key, at in table.items() if key in _ABOUT
    }
    return PublishedFigure(name, series=series, **about)


def known_cases(*parts: str) -> list[Case]:
    """Return the published runs of these parts of the file (`gpt`, `t5`, `open`, `torchtitan`); default: all.

    Raises `KeyError` for another name.
    """
    tables = _tables(_RUNS)
    return [_case(group, run) for part in parts or tables for group in tables[part] for run in group["runs"]]


def _case(group: Mapping[str, Any], run: Mapping[str, Any]) -> Case:
    """Return a run completed by its group's values; if its figure has no value, it was out of memory."""
    stated = {**group, **run, "settings": {**group["settings"], **run.get("settings", {})}}
    published_at, place = stated.pop("published"), stated.pop("at", stated["gpus"])
    del stated["runs"]
    found = {
        Figure[name.upper()]: at if isinstance(at, float) else published(at[0]).at(at[1], place)
        for name, at in published_at.items()
    }
    values = {figure: value for figure, value in found.items() if value is not None}
    return Case(**stated, published=values, ran_out=not values)


def _tables(file: str) -> JsonObject:
    return tomllib.loads(resources.files("fsdpbench.lab.validation").joinpath(file).read_text("utf-8"))
