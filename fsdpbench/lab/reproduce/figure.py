"""A figure of a publication as it is simulated: its points, its other possible settings, what it says.

PaperFigure ──┬── Point     one published value, its case, and its place in the chart
              ├── Variant   a change of settings that were not published: together they span the band
              ├── Claim     what the publication concludes, and the bounds that follow from its values
              └── Contrast  two of its runs whose traces explain the effect
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from fsdpbench.base.files.documents import table_beside
from fsdpbench.lab.reproduce.claims import Claim, Place
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.lab.validation.runs.paper import PublishedFigure


class Drawing(Enum):
    """How the publication draws it."""

    LINES = "lines"
    BARS = "bars"


@dataclass(frozen=True)
class Point:
    """One published value (None: the run was out of memory), in the unit of `kind`."""

    series: str
    x: Place
    published: float | None
    case: Case
    kind: Figure


@dataclass(frozen=True)
class Variant:
    """Other settings that the publication leaves possible.

    `change` makes the case of it, or None where it changes nothing. Where no run is simulated, `ready` has
    the predictions by name of the case. `contradicts`: what the publication states against them; such
    settings are shown for what they explain, outside the band.
    """

    words: str
    change: Callable[[Case], Case | None] | None = None
    ready: Mapping[str, Prediction] = field(default_factory=dict)
    contradicts: str = ""


@dataclass(frozen=True)
class Contrast:
    """Runs (words: case) whose traces show why the figure looks as it does.

    `memory`: memory over time explains it, not the streams. `window`: where in the step the excerpt of the
    timeline begins (0 to 1), `units`: how many units it is long.
    """

    runs: Mapping[str, Case]
    memory: bool = False
    window: float = 0.6
    units: float = 3.0


@dataclass(frozen=True)
class Words:
    """The words of the page about a figure, from `words.toml`.

    `shows`: what the publication concludes; `why`: the mechanism, one text for each contrast; `differs`: what
    is known of why the shapes disagree, and what would decide it.
    """

    title: str
    shows: str
    assumed: tuple[str, ...]
    why: tuple[str, ...] = ()
    differs: str = ""


@functools.cache
def words() -> Mapping[str, Words]:
    """The words of every figure, in the order of the page."""
    return msgspec.convert(table_beside(__file__, "words.toml"), dict[str, Words])


@dataclass(frozen=True)
class PaperFigure:
    """One figure: `about` is what was published of it.

    `ready`: predictions of points that need no simulated run, by name of their case.
    """

    about: PublishedFigure
    drawing: Drawing
    points: tuple[Point, ...] = ()
    variants: tuple[Variant, ...] = ()
    claims: tuple[Claim, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    x_title: str = ""
    log_x: bool = False
    ready: Mapping[str, Prediction] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name that `--only` takes."""
        return self.about.name

    @property
    def words(self) -> Words:
        """Its words on the page."""
        return words()[self.name]

    @property
    def is_open(self) -> bool:
        """Whether settings that decide are not published."""
        return any(not each.contradicts for each in self.variants)
