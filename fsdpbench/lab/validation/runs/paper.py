"""Published figures of PyTorch's FSDP and the runs behind them, from two TOML files beside this folder.

`fsdp_paper.toml` has the values, `published_runs.toml` the settings of each run and where its values stand.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fsdpbench.base.reading import JsonObject
from fsdpbench.lab.validation.runs.case import Case, Figure

_FIGURES, _RUNS = "fsdp_paper.toml", "published_runs.toml"
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
        key: tuple(at) if isinstance(at, list) else at for key, at in table.items() if key in _ABOUT}
    return PublishedFigure(name, series=series, **about)


def known_cases(*parts: str) -> list[Case]:
    """The published runs of these parts of the file (`gpt`, `t5`, `open`, `torchtitan`); of all without any.

    Raises `KeyError` for another name.
    """
    tables = _tables(_RUNS)
    return [
        _case(group, run) for part in parts or tables for group in tables[part] for run in group["runs"]
    ]


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
