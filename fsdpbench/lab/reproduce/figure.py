"""A figure of a publication as it is simulated: its points, its other possible settings, what it says.

PaperFigure ──┬── Point     one published value, its case, and its place in the chart
              ├── Variant   a change of settings that were not published: together they span the band
              ├── Claim     what the publication concludes, and the bounds that follow from its values
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
"""The value of a series at a place; None: the run was out of memory, or did not finish."""

PART_OF_EFFECT = 0.5
LEAST_RATIO = 0.02
LEAST_LEVEL = 0.05


class Kind(Enum):
    """The kind of a comparison, and when a simulated value agrees: one rule, from published values alone.

    RATIO    r, of two published values: the simulated ratio differs from r by at most half of the published
             effect (|ln r| / 2), 2 %, or what reading the two values leaves open: the largest of the three
    LEVEL    a published value: the simulated one differs by at most 5 %, or by what reading leaves open
    RAN_OUT  of the named runs, as many are out of memory
    RETRIES  none, or some, as published: over how many steps they were counted is not
    """

    RATIO = "x"
    LEVEL = "level"
    RAN_OUT = "runs out of memory"
    RETRIES = "retries"


@dataclass(frozen=True)
class Bounds:
    """The values that agree, both ends included."""

    low: float
    high: float

    def hold(self, value: float) -> bool:
        """Whether `value` agrees."""
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
        """The compared number; None: it is not known."""
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
        """Return the simulated numbers that agree with the published ones. Raises `ValueError` for none."""
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
