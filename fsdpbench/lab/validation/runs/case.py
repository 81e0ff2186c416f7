"""A published run: everything needed to simulate it, and the figures that were measured.

Those of PyTorch's FSDP are in two TOML files beside this folder: `fsdp_paper.toml` has the values,
`published_runs.toml` the settings of each run and where its values stand.
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
    """A figure that a publication gives: where it is in a result, and its unit in tables."""

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
        """Return one unit of the published figure in the result's own."""
        return self.value[2]

    @property
    def is_speed(self) -> bool:
        """Whether more of it is a shorter step."""
        return self in (Figure.TOKENS, Figure.HARDWARE_TFLOPS, Figure.SAMPLES)

    @property
    def is_time(self) -> bool:
        """Whether it says how long a step took."""
        return self.is_speed or self in (Figure.SECONDS, Figure.MILLISECONDS)


_FITTED = frozenset({"llm-foundry"})


class Network(Enum):
    """The statement of a publication on the network between nodes."""

    STATED = "stated"
    ONE_NODE = "one node"
    NOT_STATED = "not stated"


@dataclass(frozen=True)
class Case:
    """One published run. `assumed` names what the publication does not say; such a case has no bar."""

    name: str
    group: str
    source: str
    model: str
    hardware: str
    gpus: int
    settings: Mapping[str, Value]
    published: Mapping[Figure, float]
    system: str = "torch-fsdp1"
    """The software that was used, of its time."""
    shape: Mapping[str, ShapeValue] = field(default_factory=dict)
    assumed: str = ""
    collapsed: bool = False
    """Memory was full and the run slow: it has its own target, and no place on average."""
    software: str | None = None
    """A software profile instead of the system's own."""
    chip: str = ""
    """Profile of the chip, where `hardware` is a file made of it."""
    network: Network = Network.STATED
    ran_out: bool = False
    """The run was out of memory; nothing else was published of it."""
    chosen: bool = False
    """A setting that is not published, or published otherwise, is the one with which the run comes out: its
    error says nothing about runs that are not known."""
    open: bool = False
    """Shape or settings that decide are not published: shown, but no error is counted."""

    @property
    def profile(self) -> str:
        """The packaged profile of the run's chip."""
        return self.chip or self.hardware

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, and not eager."""
        return bool(self.settings.get("compile"))

    @property
    def how(self) -> str:
        """`compiled` or `eager`."""
        return "compiled" if self.compiled else "eager"

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to its source (docs/simulator.md), or a setting was chosen by it."""
        return self.chosen or self.source in _FITTED


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
    return {name: _figure(name, table) for name, table in _tables(_FIGURES).items()}


def published(name: str) -> PublishedFigure:
    """The figure of that name. Raises `KeyError`."""
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
    """The published runs of these parts of the file (`gpt`, `t5`, `open`, `torchtitan`); of all without any.

    Raises `KeyError` for another name.
    """
    tables = _tables(_RUNS)
    return [_case(group, run) for part in parts or tables for group in tables[part] for run in group["runs"]]


def _case(group: Mapping[str, Any], run: Mapping[str, Any]) -> Case:
    """A run with what its group has in common; one whose figure has no value was out of memory."""
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
