"""A figure of a publication for simulation: its points, other possible settings, and its claims.

PaperFigure ──┬── Point     one published value, its case, and its place in the chart
              ├── Variant   a change of unpublished settings: together they span the band
              ├── Claim     a conclusion of the publication, and bounds that follow from its values
              └── Contrast  two of its runs whose traces explain the effect
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from fsdpbench.base.files.documents import table_beside
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs.case import Case, Figure, PublishedFigure

Place = int | str
Lookup = Callable[[str, Place], float | None]
"""Returns the value of a series at a place; None: the run was out of memory, or did not finish."""

PART_OF_EFFECT = 0.5
LEAST_RATIO = 0.02
LEAST_LEVEL = 0.05


class Kind(Enum):
    """The kind of a comparison, and its rule, from published values alone, for when a simulated value agrees.

    RATIO    r, of two published values: the simulated ratio differs from r by at most the largest of half the
             published effect (|ln r| / 2), 2 %, and the uncertainty of reading the two values
    LEVEL    a published value: the simulated one differs by at most 5 %, or by the uncertainty of reading
    RAN_OUT  the same number of the named runs is out of memory
    RETRIES  none, or some, as published, because the number of steps they were counted over is not published
    """

    RATIO = "x"
    LEVEL = "level"
    RAN_OUT = "runs out of memory"
    RETRIES = "retries"


@dataclass(frozen=True)
class Bounds:
    """The range of values that agree, including both ends."""

    low: float
    high: float

    def hold(self, value: float) -> bool:
        """Return whether `value` agrees."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Claim:
    """A conclusion from the values at `places`; a ratio is the first over the second.

    `taken`: the parts of the simulation that were set from these same values. Such a claim tests nothing.
    """

    kind: Kind
    words: str
    places: tuple[tuple[str, Place], ...]
    taken: str = ""

    def measure(self, value: Lookup) -> float | None:
        """Return the number to compare; None if it is unknown."""
        found = [value(*place) for place in self.places]
        if self.kind is Kind.RAN_OUT:
            return float(sum(each is None for each in found))
        if any(each is None for each in found):
            return None
        known = [each for each in found if each is not None]
        if self.kind is not Kind.RATIO:
            return known[0]
        return known[0] / known[1] if known[0] and known[1] else None

    def bounds(self, figure: PublishedFigure) -> Bounds:
        """Return the range of simulated numbers that agree. Raises `ValueError` if nothing was published."""
        published = self.measure(figure.at)
        if published is None:
            raise ValueError(f"figure {figure.name} has no value for the claim '{self.words}'")
        if self.kind is Kind.RAN_OUT:
            return Bounds(published, published)
        if self.kind is Kind.RETRIES:
            return Bounds(1, math.inf) if published else Bounds(0, 0)
        values = (figure.at(*place) for place in self.places)
        read = sum(figure.read_within / value for value in values if value)
        if self.kind is Kind.LEVEL:
            most = max(LEAST_LEVEL, read)
            return Bounds(published * (1 - most), published * (1 + most))
        off = max(PART_OF_EFFECT * abs(math.log(published)), LEAST_RATIO, read)
        return Bounds(published * math.exp(-off), published * math.exp(off))


class Drawing(Enum):
    """The style in which the publication draws the figure."""

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

    `change` returns the changed case, or None if nothing changes. If no run is simulated, `ready` has the
    predictions by the case's name. `contradicts`: a statement of the publication against these settings. They
    are then shown for what they explain, outside the band.
    """

    words: str
    change: Callable[[Case], Case | None] | None = None
    ready: Mapping[str, Prediction] = field(default_factory=dict)
    contradicts: str = ""


@dataclass(frozen=True)
class Contrast:
    """Runs (words: case) whose traces explain the figure.

    `memory`: show memory over time instead of the streams. `window`: where in the step the excerpt of the
    timeline begins (0 to 1), `units`: its length in units.
    """

    runs: Mapping[str, Case]
    memory: bool = False
    window: float = 0.6
    units: float = 3.0


@dataclass(frozen=True)
class Words:
    """Text for the page about a figure, from `words.toml`.

    `shows`: the conclusion of the publication; `why`: the mechanism, one text for each contrast; `differs`:
    known reasons why the shapes disagree, and what would decide it.
    """

    title: str
    shows: str
    assumed: tuple[str, ...]
    why: tuple[str, ...] = ()
    differs: str = ""


@functools.cache
def words() -> Mapping[str, Words]:
    """Return the text of every figure, in the order of the page."""
    return msgspec.convert(table_beside(__file__, "words.toml"), dict[str, Words])


@dataclass(frozen=True)
class PaperFigure:
    """One figure: `about` is its published data.

    `ready`: predictions of points that need no simulated run, by the name of their case.
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
        """Return the figure's name for `--only`."""
        return self.about.name

    @property
    def words(self) -> Words:
        """Return the figure's text for the page."""
        return words()[self.name]

    @property
    def is_open(self) -> bool:
        """Return whether settings that matter are not published."""
        return any(not each.contradicts for each in self.variants)
