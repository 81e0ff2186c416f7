"""The ranking: the metric, the order of the rows, near ties, the Pareto front, and the table's columns.

Rows are in order of throughput per GPU. Tokens count if every finished configuration has them (they stay
comparable if the sequence length varies), otherwise samples, or steps if samples are not counted.
Configurations that did not finish follow in a fixed order of status: the table never hides one."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.base.settings import SETTINGS
from fsdpbench.base.settings.values import is_mixed
from fsdpbench.reports.figures import FIGURES, Figure
from fsdpbench.reports.pages import display
from fsdpbench.reports.pages.display import NOTHING, in_table, phrase, setting, signed_percent, varying
from fsdpbench.reports.pages.view import Configuration, RunView, Status
from fsdpbench.reports.result import WIDE, Interval

_ORDER = tuple(Status)
_COMPILE = "compile"
Links = Callable[[Configuration], list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Metric:
    """The kind of throughput that a run is ranked by."""

    field: str
    words: str

    @property
    def counts_tokens(self) -> bool:
        """Return whether it counts tokens, and not samples."""
        return self.field == TOKENS.field

    @property
    def each(self) -> str:
        """Return the unit of throughput: a GPU, or a rank on the CPU."""
        return "rank" if self.words.endswith("/rank") else "GPU"

    def of(self, row: Configuration) -> float | None:
        """Return the row's throughput; None if it has none."""
        value = getattr(row.result, self.field) if row.status is Status.OK else None
        if value is None or value <= 0:
            return None
        return 1 / value if self is STEPS else value


TOKENS = Metric("tokens_per_s_per_gpu", "tokens/s/GPU")
SAMPLES = Metric("samples_per_s_per_gpu", "samples/s/GPU")
STEPS = Metric("step_time_s", "steps/s")
TOKENS_OF_RANKS = Metric("tokens_per_s_per_gpu", "tokens/s/rank")
SAMPLES_OF_RANKS = Metric("samples_per_s_per_gpu", "samples/s/rank")


@dataclass(frozen=True, slots=True)
class Paired:
    """A throughput over another of the same sweep, minus 1 (-0.02: 2 % slower), and the 90 % interval of this
    difference. For measured runs the interval comes from the spreads of both."""

    change: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Return whether it is clear which of the two is faster."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if self.low == self.high:
            return signed_percent(self.change)
        text = f"{signed_percent(self.change)} [{self.low * 100:+.1f}, {self.high * 100:+.1f}]"
        return text.replace("-", "−")

    @property
    def brief(self) -> str:
        """Return the difference as `−1.5 ±0.4 %`; if it is wide, as `−70 % [−95.0, +94.8]`."""
        half = (self.high - self.low) / 2
        if half > WIDE:
            return str(self)
        error = f" ±{half * 100:.1f}" if half else ""
        return f"{self.change * 100:+.1f}{error} %".replace("-", "−")


@dataclass(frozen=True, slots=True)
class Ranked:
    """A row with its place (from 1; None if it did not finish) and its share of the best throughput. `rank`:
    the place that it shares with all rows from which it cannot be distinguished."""

    place: int | None
    row: Configuration
    throughput: float | None
    of_best: float | None
    rank: int | None = None


def metric_of(view: RunView) -> Metric:
    """Return tokens if every finished configuration counts them, otherwise samples, per rank if all ran on
    CPUs; steps if no configuration counts either."""
    finished = view.with_status(Status.OK)
    if finished and not any(TOKENS.of(row) or SAMPLES.of(row) for row in finished):
        return STEPS
    on_cpu = bool(finished) and all(row.device == "cpu" for row in finished)
    if finished and all(row.result.tokens_per_s_per_gpu for row in finished):
        return TOKENS_OF_RANKS if on_cpu else TOKENS
    return SAMPLES_OF_RANKS if on_cpu else SAMPLES


def rank(view: RunView) -> list[Ranked]:
    """Return every configuration, best first; ties by reserved memory, then by name."""
    metric = metric_of(view)

    def order(row: Configuration) -> tuple[float, int, float, str]:
        return (-(metric.of(row) or 0.0), _ORDER.index(row.status), row.result.reserved or 0.0, row.name)

    rows = sorted(view.configurations, key=order)
    best = metric.of(rows[0]) if rows else None
    speeds = [metric.of(row) for row in rows]
    ranks = shared_ranks(
        [_cost(row, speed) if speed else None for row, speed in zip(rows, speeds, strict=True)]
    )
    return [
        Ranked(place, row, speed, speed / best, ranks[place - 1])
        if speed and best
        else Ranked(None, row, speed, None)
        for place, (row, speed) in enumerate(zip(rows, speeds, strict=True), start=1)
    ]


# Two simulated configurations of one sweep share most of their errors, which cancel in the comparison. Their
# difference is as uncertain as the work and the waits that only one of them has, also for settings that no
# published run has. Both use the same link to the host: its error counts with the difference of its effects.

UNSHARED = 0.019
"""The part of their errors that no two steps share, from published pairs (`ci/measure_differences.py`)."""


def error_of_pair(
    halves: tuple[float, float], moved: float, least: float = UNSHARED, own: float | None = None
) -> float:
    """Return the half width of ln(ratio) of two steps with half widths `halves`; `moved`: the part that they
    do not share, as a share of the shorter; `own`: its half width, by default the lesser of `halves`."""
    return least + abs(halves[0] - halves[1]) + (min(halves) if own is None else own) * moved


@dataclass(frozen=True, slots=True)
class Cost:
    """A unit of work: its time, and the time of its kernels in it (NaN: unknown).

    `halves`: the interval's half widths, or the spread of measured runs; `link`, `apart`: as in `Interval`.
    `because`: why the interval is wide; None: measured.
    """

    time: float
    work: float
    halves: tuple[float, float]
    link: tuple[float, float] = (0.0, 0.0)
    apart: float = 0.0
    because: frozenset[str] | None = None


def cost_of(speed: float, interval: Interval | None, spread: float = 0.0) -> Cost:
    """Return the cost of a unit of work at this speed, which is above 0. `spread`: of measured runs."""
    if interval is None:
        return Cost(1 / speed, 0.0, (spread, spread))
    halves = interval.shared or (interval.half_width, interval.half_width)
    work = math.nan if interval.work is None else interval.work
    return Cost(1 / speed, work / speed, halves, interval.link, interval.apart, frozenset(interval.because))


def pair(one: Cost, other: Cost) -> Paired:
    """Return the throughput of `one` over that of `other`. Every command and page uses this comparison."""
    if None in (one.because, other.because):
        error = one.halves[1] + other.halves[1]
    else:
        waits = one.time - one.work, other.time - other.work
        moved = (abs(one.work - other.work) + abs(waits[0] - waits[1])) / min(one.time, other.time)
        alike, least = one.because == other.because, math.log1p(max(one.apart, other.apart))
        own = (min if alike else max)(one.halves[1], other.halves[1])
        error = error_of_pair((one.halves[0], other.halves[0]), moved, own=own)
        if not alike or math.isnan(error):
            error = max(least, error)
    log = math.log(other.time / one.time)
    # Effects of a slower link, and of a faster one.
    shifts = 0.0, other.link[1] - one.link[1], one.link[0] - other.link[0]
    low, high = math.hypot(error, min(shifts)), math.hypot(error, max(shifts))
    return Paired(math.expm1(log), math.expm1(log - low), math.expm1(log + high))


def _cost(row: Configuration, speed: float) -> Cost:
    runs = row.result.repeats or row.result.measured
    return cost_of(speed, row.result.interval, (runs.spread if runs else None) or 0.0)


def paired(one: Ranked, other: Ranked) -> Paired:
    """Return the throughput of one row over another's; both rows must have one."""
    return pair(*(_cost(each.row, each.throughput or math.nan) for each in (one, other)))


def shared_ranks(costs: Sequence[Cost | None]) -> list[int | None]:
    """Return the rank of each cost: 1 plus the number of surely lower costs, rising with the cost; None for
    no cost. Among costs with the same unknowns, a cost is as good as the first one that it cannot be
    distinguished from."""
    ranks: list[int | None] = [None] * len(costs)
    alike: dict[frozenset[str] | None, list[Cost]] = defaultdict(list)
    nearest: dict[tuple[frozenset[str] | None, ...], int] = {}
    last, known = 0, [(cost.time, place, cost) for place, cost in enumerate(costs) if cost is not None]
    for _, place, cost in sorted(known, key=lambda each: each[:2]):
        alike[cost.because].append(cost)
        ahead, key = 0, cost.because
        for kind, each in alike.items():
            near = nearest.get((key, kind), 0)
            if kind != key:
                while near < len(each) and pair(cost, each[near]).is_clear:
                    near += 1
            elif not cost.halves[1] or pair(cost, each[near]).is_clear:
                near = len(each) - 1
            nearest[key, kind] = near
            ahead += near
        ranks[place] = last = max(last, 1 + ahead)
    return ranks


def pareto_front(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Return the rows that no other row beats in both throughput and reserved memory, by rising memory."""
    measured = [
        (memory, entry) for entry in ranked if entry.throughput and (memory := entry.row.result.reserved)
    ]
    front: list[Ranked] = []
    for _, entry in sorted(measured, key=lambda pair: (pair[0], -(pair[1].throughput or 0.0))):
        if not front or (entry.throughput or 0.0) > (front[-1].throughput or 0.0):
            front.append(entry)
    return front


def varying_settings(rows: Sequence[Configuration]) -> list[str]:
    """Return the settings with at least two values over the rows, in order of first appearance."""
    return varying([row.settings for row in rows])


def constant_settings(rows: Sequence[Configuration]) -> dict[str, str]:
    """Return settings with one value wherever they apply: name to value, noted if some rows lack them."""
    varying = set(varying_settings(rows))
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in row.settings if name not in varying):
        having = [row for row in rows if name in row.settings]
        note = " (where it applies)" if len(having) < len(rows) else ""
        found[name] = setting(having[0].settings[name]) + note
    return found


def values_of(rows: Sequence[Configuration], name: str) -> list[str]:
    """Return a setting's values over the rows: numbers by size, then words."""

    def order(text: str) -> tuple[int, float, str]:
        return (0, float(text), text) if text.replace(".", "", 1).isdigit() else (1, 0.0, text)

    return sorted({setting(row.settings[name]) for row in rows if name in row.settings}, key=order)


def label(row: Configuration, varying: Sequence[str]) -> str:
    """Return a row's varying settings, `impl-fsdp1, batch 12, no limiter`; its name if it has none."""
    parts = [phrase(name, row.settings[name]) for name in varying if row.settings.get(name) is not None]
    return ", ".join(parts) or row.name


def short_label(row: Configuration, varying: Sequence[str]) -> str:
    """Return only the values of the varying settings: `impl-fsdp1 · block · pre`; `compiled` or `eager` if
    that varies, and `compiled` if all rows are."""
    words = [in_table(name, row.settings[name]) for name in varying if name in row.settings]
    if row.compiled and _COMPILE not in varying:
        words.append("compiled")
    return " · ".join(words) or row.name


# The recommended configurations: the best of torch's FSDPs and the best of ours, if they ran.

OURS_RAN_ON_GPUS = False
"""Whether `ci/measured` holds a run of ours on several GPUs; a test compares this with that folder."""
NOT_YET = "not yet run on several GPUs"
_UNNOTICED = 0.001
"""The share of a speed that is no reason to change a setting."""


@dataclass(frozen=True)
class Chosen:
    """The recommended rows, of torch's FSDPs and of ours: each None if no such system ran. `gain`: the
    change of throughput from torch's to ours."""

    torchs: Ranked | None
    ours: Ranked | None
    gain: Paired | None = None


def chosen(ranked: Sequence[Ranked]) -> Chosen:
    """Return the best of each: of those that cannot be distinguished, prefer one that is not risky, then
    FSDP2, then the same settings for all units, then the defaults."""
    torchs, ours = _best(ranked, "torch-fsdp"), _best(ranked, "impl-")
    return Chosen(torchs, ours, paired(ours, torchs) if torchs and ours else None)


def doubt(row: Configuration) -> str:
    """Return a warning about a row, in brackets; "" if there is none."""
    doubts = []
    if row.system.startswith("impl-") and not OURS_RAN_ON_GPUS and row.simulated:
        doubts.append(NOT_YET)
    if (row.result.alloc_retries_per_step or 0) > 0:
        doubts.append("risky: the allocator retries")
    elif is_risky(row):
        doubts.append("risky: memory is nearly full")
    return f" ({'; '.join(doubts)})" if doubts else ""


def is_risky(row: Configuration) -> bool:
    """Return whether memory fits only within the prediction's error, or with retries."""
    return row.result.is_risky or (row.result.alloc_retries_per_step or 0) > 0


def _best(ranked: Sequence[Ranked], prefix: str) -> Ranked | None:
    def doubts(each: Ranked) -> tuple[bool, bool, bool]:
        mixed = any(map(is_mixed, each.row.settings.values()))
        return is_risky(each.row), not each.row.system.endswith("fsdp2"), mixed

    own = [entry for entry in ranked if entry.throughput and entry.row.system.startswith(prefix)]
    equal = [entry for entry in own if not paired(entry, own[0]).is_clear] or own[:1]
    kept = [entry for entry in equal if doubts(entry) == min(map(doubts, equal))]
    return min(
        kept, key=lambda each: of_equals(each.row.settings, each.throughput, kept[0].throughput), default=None
    )


def of_equals(settings: Mapping[str, Any], speed: float | None, fastest: float | None) -> tuple[float, float]:
    """Return what orders configurations that cannot be distinguished: of those as fast as the fastest to
    `_UNNOTICED`, the one with the fewest settings that are not the defaults; then by speed."""
    named = [name for name in SETTINGS if name != "batch" and settings.get(name) is not None]
    changed = sum(settings[name] != SETTINGS[name].default for name in named)
    is_near = (speed or 0.0) >= (1 - _UNNOTICED) * (fastest or 0.0)
    return changed if is_near else math.inf, -(speed or 0.0)


@dataclass(frozen=True, slots=True)
class Shown:
    """A column of figures: its header, the value to sort by, the text to show, whether values are marked, and
    its weight on a terminal."""

    name: str
    value: Callable[[Configuration], float | None]
    text: Callable[[float | None], str]
    warned: bool = False
    weight: int = 0


def column_of(figure: Figure, each: str) -> Shown:
    """Return the column of a figure of the table; `each`: `GPU` or `rank`."""
    header = (figure.column or figure.detail).format(each=each)
    text, warned = getattr(display, figure.form), "warned" in figure.marks
    return Shown(header, lambda row: figure.of(row.result), text, warned, figure.weight)


def figures(metric: Metric) -> list[Shown]:
    """Return every figure that a result can hold, in the order of the table's columns."""

    def half_width(row: Configuration) -> float | None:
        return None if row.result.interval is None else row.result.interval.half_width

    return [
        Shown(metric.words, metric.of, lambda value: display.number(value, 4)),
        Shown("90 % ±", half_width, display.percent, weight=8),
        *(column_of(figure, metric.each) for figure in FIGURES if figure.column),
    ]


def known_figures(ranked: Sequence[Ranked], metric: Metric) -> list[Shown]:
    """Return the figures that at least one row knows; HFU only if it differs from MFU."""
    rows = [entry.row for entry in ranked]
    known = [figure for figure in figures(metric) if any(figure.value(row) is not None for row in rows)]
    if all(row.result.hfu == row.result.mfu for row in rows):
        known = [figure for figure in known if figure.name != "HFU"]
    if not any(row.result.ooms for row in rows):
        known = [figure for figure in known if figure.name != "out of memory"]
    return known


def _shared_ranks(ranked: Sequence[Ranked]) -> list[Shown]:
    """Return the column of ranks, if rows share a rank because they cannot be distinguished."""
    ranks = {id(entry.row): entry.rank for entry in ranked}
    given = [rank for rank in ranks.values() if rank is not None]
    if len(set(given)) == len(given):
        return []
    return [Shown("rank", lambda row: ranks[id(row)], display.count)]


_WITH_FIGURES = (Status.OK, Status.OOM, Status.RACE, Status.RANK_MISMATCH)


@dataclass(frozen=True, slots=True)
class RankingTable:
    """All configurations, best first; columns are the place, the varying settings, figures, and the status.

    filters: name, column number and choices of each drop-down.
    with_detail: names of the folders whose step can be shown.
    """

    ranked: Sequence[Ranked]
    varying: Sequence[str]
    figures: Sequence[Shown]
    filters: Sequence[tuple[str, int, list[str]]]
    with_detail: frozenset[str]
    links: Links

    @classmethod
    def of(
        cls,
        ranked: Sequence[Ranked],
        varying: Sequence[str],
        metric: Metric,
        with_detail: frozenset[str],
        links: Links,
    ) -> "RankingTable":
        """Return the table with figures of `metric`, and filters for columns with several values."""
        shown = known_figures(ranked, metric)
        shown[1:1] = _shared_ranks(ranked)
        rows = [entry.row for entry in ranked]
        statuses = [status.words for status in Status if any(row.status is status for row in rows)]
        choices = [
            *((name, place, values_of(rows, name)) for place, name in enumerate(varying, start=1)),
            ("status", 1 + len(varying) + len(shown), statuses),
        ]
        filters = [(name, place, values) for name, place, values in choices if len(values) > 1]
        return cls(ranked, varying, shown, filters, with_detail, links)

    def label(self, row: Configuration) -> str:
        """Return the row's varying settings."""
        return label(row, self.varying)

    def setting(self, row: Configuration, name: str) -> str:
        """Return a setting of the row as text."""
        return display.setting(row.settings[name]) if name in row.settings else NOTHING

    def value(self, row: Configuration, figure: Shown) -> float | None:
        """Return a figure of the row; None if figures are not shown for the row's status."""
        return figure.value(row) if row.status in _WITH_FIGURES else None
