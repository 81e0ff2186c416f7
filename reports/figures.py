"""The table of figures, `figures.csv`: one row for each figure of a result; every list of figures uses it.

Results hold the figures with a function in `computed`, the index and the exports have a column for each
`flat` row, the gate judges rows with `judged`, pages show rows with a `column`, the schema describes rows
with `words`, and `reports.consistency` checks each range. To add a figure, add a row, and the function in
`reports.result_figures` that computes it. Relations between figures are the rows of `result_rules.csv`.

Rows are in reading order; the order of `result.json` is the order of `Result`'s fields.
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
"""Upper bound of every time, size and count of a step; sums and differences below it stay finite."""


class Worse(Enum):
    """The direction in which a figure gets worse; NEITHER: a change is reported, but is not worse."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


class Judged(Enum):
    """Whether the gate judges a figure. WITNESS: no, but a baseline keeps it, because relations bind judged
    figures to it. MEASURED: only on real devices, where steps vary."""

    NO = "no"
    WITNESS = "witness"
    MEASURED = "measured"
    YES = "yes"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure, or a part of a result that holds figures.

    Args:
        path: dotted path in `result.json` (`*`: any name), or a name that `reports.consistency` derives.
        name: name in the index, in exports and in the gate, if it is not the path.
        unit: `s`, `B`, or empty for counts and shares.
        worse: the direction in which it gets worse.
        judged: whether the gate judges it.
        marks: `flat`: the index and the exports have a column for it; `interval`: it has an interval if
            simulated; `rate`: an amount over the step time, which follows the step time over repeated runs
            and in its interval; `warned`: the page marks values that are not 0; `traced`: absent if not run.
        column: header in the page's table, empty for no column; `{each}` becomes `GPU` or `rank`.
        weight: if a terminal lacks room, columns of the least weight are dropped first; 0: no column there.
        detail: header among one configuration's figures, if it has no `column`.
        form: how it is displayed: the name of a function in `reports.pages.display`.
        least, most: bounds that no run exceeds; None without a range.
        least_judged: a higher lower bound for the gate: clocks count nanoseconds (1e-9), and an event that
            only some steps have counts at least 1e-6 in a mean step.
        computed: the function of records and traces; None if a part holds it or the bench adds it.
        kind: its type in JSON.
        words: description, for the schema.
        alone: why no relation binds it.
        since: the first version that has it.
        short: a name for budgets; `scale`: how many units of that name make one unit of the figure.
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
        """The name of its column in the index."""
        return f"time_{self.name}" if self.path.startswith("time_s.") else self.name

    @property
    def is_rate(self) -> bool:
        """Whether it is an amount over the step time."""
        return "rate" in self.marks

    def of(self, result: Result) -> Any:
        """Return the typed value in `result`; None if it has none."""
        return result.at(self.path)


def _figure(row: Mapping[str, str]) -> Figure:
    """Return the figure of a row of the file; empty cells give the fields' defaults."""
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
    """Return the figures with a column in the index and the exports: whole figures first, then parts."""

    def place(figure: Figure) -> tuple[bool, int, int]:
        head, _, tail = figure.path.partition(".")
        return bool(tail), _index(_PLACES, head), _index(_PARTS, tail)

    return sorted((figure for figure in FIGURES if "flat" in figure.marks), key=place)


def nothing() -> dict[str, None]:
    """Return the figures of a configuration that did not run, all None, in the order of `result.json`."""
    paths = {each.path for each in FIGURES if each.words and "traced" not in each.marks} | {"interval"}
    return dict.fromkeys(sorted((path for path in paths if "." not in path), key=_place))


def computed(records: Sequence[RankRecord], analysis: Analysis) -> dict[str, object]:
    """Return all figures that are computed from records and traces; None for unknown ones.

    Args:
        records: one for each rank of one configuration.
        analysis: the analysis of the same ranks' traces.
    """
    ran = Ran(records, analysis)
    made = {figure.path: figure.computed for figure in FIGURES if figure.computed is not None}
    return {path: made[path](ran) for path in sorted(made, key=_place)}


@functools.cache
def ranges() -> dict[str, tuple[float, float]]:
    """Return the least and greatest value of figures by path, more specific paths first."""
    found = {row.path: (row.least, row.most) for row in FIGURES if row.least is not None}
    with_interval = (row.path for row in FIGURES if row.marks & {"rate", "interval"})
    return {f"interval.{path}": (0.0, math.inf) for path in with_interval} | found


def schema() -> dict[str, dict[str, object]]:
    """Return the JSON schema of every top-level figure of a result, by name."""
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
