"""The table of figures, `figures.csv`: one row a figure of a result, from which every list of them is read.

Results hold what rows compute, the index and the exports have a column for each `flat` row, the gate judges
those with `judged`, pages show those with a `column`, the schema describes those with `words`, and
`reports.consistency` checks the range of each.  A new figure is one row, and the function in
`reports.result_figures` that computes it.  Relations between figures are the rows of `result_rules.csv`.

The order is that in which people read figures; that of `result.json` is the order of `Result`'s fields.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fsdpbench.base.files.documents import rows_beside
from fsdpbench.reports import result_figures
from fsdpbench.reports.analysis.model import Analysis
from fsdpbench.reports.rank_record import RankRecord
from fsdpbench.reports.result import PeakMemory, Result, StepParts
from fsdpbench.reports.result_figures import Ran

LARGEST = 2.0**63
"""No time, size or count of a step is beyond it, and sums and differences below it stay finite."""


class Worse(Enum):
    """The direction in which a figure gets worse; NEITHER where a change is only worth knowing."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


class Judged(Enum):
    """Whether the gate judges a figure. WITNESS: it does not, but keeps it in a baseline, since it binds
    those that are judged. MEASURED: it does where a step is not exact."""

    NO = "no"
    WITNESS = "witness"
    MEASURED = "measured"
    YES = "yes"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure, or a part of a result that holds some.

    Args:
        path: dotted place in `result.json` (`*`: any name), or a name that `reports.consistency` derives.
        name: in the index, in exports and in the gate, where that is not the path.
        unit: `s`, `B`, or nothing for counts and shares.
        worse: the direction in which it gets worse.
        judged: what the gate does with it.
        marks: `flat`, it has a column in the index and the exports; `interval`, simulated it has one; `rate`,
            it is an amount over the step time, and follows that over repeated runs and in its interval;
            `warned`, the page marks values other than 0; `traced`, it is absent where nothing ran.
        column: its header in the page's table, none without; `{each}` is `GPU` or `rank`.
        weight: on a terminal, columns of the least go first where there is no room; 0: it has none there.
        detail: its header among a configuration's own figures, where it has no `column`.
        form: how people see it, the name of a function in `reports.pages.display`.
        least, most: what no run is beyond; None where it has no range.
        least_judged: a higher bound in the gate: clocks count nanoseconds (1e-9), and what every step has at
            least once in a while is at least 1e-6 in a mean step.
        computed: how it is made of records and traces; None for what a part holds, or the bench adds.
        kind: its type in JSON.
        words: what it is, for the schema.
        alone: why no relation binds it.
        since: the version that had it first.
        short: a name for budgets, and `scale`, how many of that name's units are one of the figure's.
    """

    path: str
    name: str = ""
    unit: str = ""
    worse: Worse = Worse.HIGHER
    judged: Judged = Judged.NO
    marks: frozenset[str] = frozenset()
    column: str = ""
    weight: int = 0
    detail: str = ""
    form: str = "number"
    least: float | None = None
    most: float = math.inf
    least_judged: float = 0.0
    computed: Callable[[Ran], object] | None = None
    kind: str = "number"
    words: str = ""
    alone: str = ""
    since: str = "0.1.0"
    short: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.path)

    @property
    def in_index(self) -> str:
        """Its column in the index."""
        return f"time_{self.name}" if self.path.startswith("time_s.") else self.name

    @property
    def is_rate(self) -> bool:
        """Whether it is an amount over the step time."""
        return "rate" in self.marks

    def of(self, result: Result) -> Any:
        """Return what `result` holds of it, by its types; None where it holds nothing."""
        return result.at(self.path)


def _figure(row: Mapping[str, str]) -> Figure:
    """Return a row of the file, whose empty cells are the fields' defaults."""
    given: dict[str, Any] = {name: cell for name, cell in row.items() if cell and name != "range"}
    if row["range"]:
        given["least"], given["most"] = map(float, row["range"].split())
    of_cells: dict[str, Callable[[str], object]] = {
        "worse": Worse,
        "judged": Judged,
        "marks": lambda cell: frozenset(cell.split()),
        "least_judged": float,
        "weight": int,
        "scale": float,
        "computed": functools.partial(getattr, result_figures),
    }
    return Figure(**given | {name: of_cells[name](given[name]) for name in given.keys() & of_cells.keys()})


FIGURES = tuple(map(_figure, rows_beside(__file__, "figures.csv")))

_PLACES = [*Result.__struct_fields__]
_PARTS = [*PeakMemory.__struct_fields__, *StepParts.__struct_fields__]


def flat() -> list[Figure]:
    """Return the figures that the index and the exports have a column of: those of the whole, then parts'."""

    def place(figure: Figure) -> tuple[bool, int, int]:
        head, _, tail = figure.path.partition(".")
        return bool(tail), _index(_PLACES, head), _index(_PARTS, tail)

    return sorted((figure for figure in FIGURES if "flat" in figure.marks), key=place)


def nothing() -> dict[str, None]:
    """Return the figures of a configuration that did not run, in the order of `result.json`."""
    paths = {each.path for each in FIGURES if each.words and "traced" not in each.marks} | {"interval"}
    return dict.fromkeys(sorted((path for path in paths if "." not in path), key=_place))


def computed(records: Sequence[RankRecord], analysis: Analysis) -> dict[str, object]:
    """Return all figures that are made of records and traces; None for what cannot be known.

    Args:
        records: one a rank, of one configuration.
        analysis: of the same ranks' traces, one configuration.
    """
    ran = Ran(records, analysis)
    made = {figure.path: figure.computed for figure in FIGURES if figure.computed is not None}
    return {path: made[path](ran) for path in sorted(made, key=_place)}


@functools.cache
def ranges() -> dict[str, tuple[float, float]]:
    """Return least and most of figures by their path, the more special paths first."""
    found = {row.path: (row.least, row.most) for row in FIGURES if row.least is not None}
    with_interval = (row.path for row in FIGURES if row.marks & {"rate", "interval"})
    return {f"interval.{path}": (0.0, math.inf) for path in with_interval} | found


def schema() -> dict[str, dict[str, object]]:
    """Return the JSON schema of every figure at the top of a result, by name."""
    described = {figure.path: _described(figure) for figure in FIGURES if figure.words}
    found = {path: each for path, each in described.items() if "." not in path}
    for head, each in found.items():
        parts = {
            path[len(head) + 1 :]: part for path, part in described.items() if path.startswith(f"{head}.")
        }
        if parts:
            each |= {"required": list(parts), "properties": parts, "additionalProperties": False}
    return found


def _described(figure: Figure) -> dict[str, object]:
    kind, _, items = figure.kind.partition(" of ")
    described: dict[str, object] = {"description": figure.words, "type": [kind, "null"]}
    if kind == "number":
        described |= {"minimum": 0} | ({"maximum": figure.most} if figure.most == 1 else {})
    return described | ({"items": {"type": items}} if items else {})


def _place(path: str) -> int:
    return _index(_PLACES, path)


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
