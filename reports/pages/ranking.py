"""The ranking: the metric, the order of the rows, near ties, and the Pareto front.

The order is by throughput per GPU. Tokens count where every finished configuration has them (they stay
comparable when the sequence length varies), samples otherwise, and steps where samples are not counted.
Configurations that did not finish stand below in a fixed order of status: the table never hides one."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpbench.reports.pages.display import setting
from fsdpbench.reports.pages.view import Configuration, RunView, Status

# Two throughputs nearer than this count as the same: measured runs differ by about as much from run to run.
NEAR = 0.01

_ORDER = tuple(Status)
_COMPILE = "compile"


@dataclass(frozen=True, slots=True)
class Metric:
    """The kind of throughput that a run is ranked by."""

    field: str
    words: str

    @property
    def counts_tokens(self) -> bool:
        """Return whether it is tokens a second, and not samples."""
        return self.field == TOKENS.field

    @property
    def each(self) -> str:
        """Return the unit of throughput: a GPU, or a rank on the CPU."""
        return "rank" if self.words.endswith("/rank") else "GPU"

    def of(self, row: Configuration) -> float | None:
        """Return the row's throughput; None where it has none."""
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
class Ranked:
    """A row with its place (from 1; None for one that did not finish) and its share of the best
    throughput. `rank`: the place that it shares with those that it cannot be distinguished from."""

    place: int | None
    row: Configuration
    throughput: float | None
    of_best: float | None
    rank: int | None = None


def metric_of(view: RunView) -> Metric:
    """Return tokens where every finished configuration counts them, samples otherwise, of a rank where all
    ran on CPUs; steps where none counts either."""
    finished = view.with_status(Status.OK)
    if finished and not any(TOKENS.of(row) or SAMPLES.of(row) for row in finished):
        return STEPS
    on_cpu = bool(finished) and all(row.device == "cpu" for row in finished)
    if finished and all(row.result.tokens_per_s_per_gpu for row in finished):
        return TOKENS_OF_RANKS if on_cpu else TOKENS
    return SAMPLES_OF_RANKS if on_cpu else SAMPLES


def rank(view: RunView) -> list[Ranked]:
    """Return every configuration, best first; equals by reserved memory, then by name."""
    metric = metric_of(view)

    def order(row: Configuration) -> tuple[float, int, float, str]:
        return (-(metric.of(row) or 0.0), _ORDER.index(row.status), reserved(row) or 0.0, row.name)

    rows = sorted(view.configurations, key=order)
    best = metric.of(rows[0]) if rows else None
    speeds = [metric.of(row) for row in rows]
    errors = [row.result.interval for row in rows]
    ranks = shared_ranks(speeds, [error.apart if error else 0.0 for error in errors])
    return [
        Ranked(place if speed else None, row, speed, speed / best if speed and best else None, shared)
        for place, (row, speed, shared) in enumerate(zip(rows, speeds, ranks, strict=True), start=1)
    ]


def reserved(row: Configuration) -> float | None:
    """Return peak reserved memory in bytes, which decides whether a configuration fits."""
    return row.result.reserved


def pareto_front(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Return the rows that no other beats in both throughput and reserved memory, by rising memory."""
    measured = [(memory, entry) for entry in ranked if entry.throughput and (memory := reserved(entry.row))]
    front: list[Ranked] = []
    for _, entry in sorted(measured, key=lambda pair: (pair[0], -(pair[1].throughput or 0.0))):
        if not front or (entry.throughput or 0.0) > (front[-1].throughput or 0.0):
            front.append(entry)
    return front


def leaner_ties(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Return rows within `NEAR` of the best that reserve at least a twentieth less memory, leanest first."""
    best_memory = reserved(ranked[0].row) if ranked and ranked[0].throughput else None
    if not best_memory:
        return []
    near = [entry for entry in ranked[1:] if entry.of_best and entry.of_best >= 1 - NEAR]
    leaner = [(memory, e) for e in near if (memory := reserved(e.row)) and memory <= 0.95 * best_memory]
    return [entry for _, entry in sorted(leaner, key=lambda pair: pair[0])]


def varying_settings(rows: Sequence[Configuration]) -> list[str]:
    """Return names of the settings with at least two values over the rows, in order of first sight."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.settings.items():
            seen.setdefault(name, set()).add(setting(value))
    return [name for name, values in seen.items() if len(values) > 1]


def constant_settings(rows: Sequence[Configuration]) -> dict[str, str]:
    """Return settings with one value wherever they apply: name to value, noted where some rows lack them."""
    varying = set(varying_settings(rows))
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in row.settings if name not in varying):
        having = [row for row in rows if name in row.settings]
        note = " (where it applies)" if len(having) < len(rows) else ""
        found[name] = setting(having[0].settings[name]) + note
    return found


def values_of(rows: Sequence[Configuration], name: str) -> list[str]:
    """Return a setting's values over the rows, numbers in their order, then words."""

    def order(text: str) -> tuple[int, float, str]:
        return (0, float(text), text) if text.replace(".", "", 1).isdigit() else (1, 0.0, text)

    return sorted({setting(row.settings[name]) for row in rows if name in row.settings}, key=order)


def label(row: Configuration, varying: Sequence[str]) -> str:
    """Return a row's varying settings, `impl-fsdp1, wrap=block, backward_prefetch=pre`; its name if none."""
    parts = [_part(name, setting(row.settings[name])) for name in varying if name in row.settings]
    return ", ".join(parts) or row.name


def short_label(row: Configuration, varying: Sequence[str]) -> str:
    """Return the varying settings' values alone: `impl-fsdp1 · block · pre`; `compiled` or `eager` where that
    varies, and `compiled` where all are."""
    words = [_short(name, setting(row.settings[name])) for name in varying if name in row.settings]
    if row.compiled and _COMPILE not in varying:
        words.append("compiled")
    return " · ".join(words) or row.name


def _short(name: str, value: str) -> str:
    return {"true": "compiled", "false": "eager"}.get(value, value) if name == _COMPILE else value


def _part(name: str, value: str) -> str:
    return value if name in ("system", "model", "hardware") else f"{name}={value}"


def shared_ranks(speeds: Sequence[float | None], apart: Sequence[float]) -> list[int | None]:
    """Return the rank of each of `speeds`: 1 and as many as are surely faster; None without a speed.

    `apart`: the share by which two speeds must differ to be distinguished, the larger one of the two; where
    it is 0 (measured), equal speeds rank in their order.
    """
    by_error: dict[float, list[float]] = defaultdict(list)
    for speed, error in zip(speeds, apart, strict=True):
        if speed:
            by_error[error].append(speed)
    for found in by_error.values():
        found.sort()
    seen: dict[float, int] = defaultdict(int)
    ranks: list[int | None] = []
    for speed, error in zip(speeds, apart, strict=True):
        if not speed:
            ranks.append(None)
            continue
        ahead = sum(
            len(found) - bisect.bisect_right(found, speed * (1 + max(error, other)))
            for other, found in by_error.items()
        )
        if not error:
            ahead += seen[speed]
            seen[speed] += 1
        ranks.append(1 + ahead)
    return ranks


# The configurations that are recommended: the best of torch's FSDPs and the best of ours, as far as both
# ran.

OURS_RAN_ON_GPUS = False
"""Whether `ci/measured` holds a run of ours on GPUs; a test holds it to that folder."""
_NOT_YET = "ours has not run on GPUs yet"


@dataclass(frozen=True)
class Chosen:
    """The recommended rows, of torch's FSDPs and of ours: each None where no such system ran, or both."""

    torchs: Ranked | None
    ours: Ranked | None

    @property
    def both(self) -> bool:
        return self.torchs is not None and self.ours is not None


def chosen(ranked: Sequence[Ranked]) -> Chosen:
    """Return the first of each in the ranking; of equally fast ones (one rank) one that is not risky."""
    return Chosen(_best(ranked, "torch-fsdp"), _best(ranked, "impl-"))


def doubt(row: Configuration) -> str:
    """Return a warning about a row, as words in brackets; empty where there is none."""
    doubts = []
    if _system(row).startswith("impl-") and not OURS_RAN_ON_GPUS and row.simulated:
        doubts.append(_NOT_YET)
    if (row.result.alloc_retries_per_step or 0) > 0:
        doubts.append("risky: the allocator retries")
    elif is_risky(row):
        doubts.append("risky: its memory fits only inside the prediction's error")
    return f" ({'; '.join(doubts)})" if doubts else ""


def is_risky(row: Configuration) -> bool:
    """Return whether its memory fits only inside the prediction's error, or with retries."""
    predicted = row.result.interval is not None and row.result.interval.risky
    return predicted or (row.result.alloc_retries_per_step or 0) > 0


def _best(ranked: Sequence[Ranked], prefix: str) -> Ranked | None:
    own = [entry for entry in ranked if entry.throughput and _system(entry.row).startswith(prefix)]
    equal = [entry for entry in own if entry.rank == own[0].rank]
    return next((entry for entry in equal if not is_risky(entry.row)), own[0] if own else None)


def _system(row: Configuration) -> str:
    return str(row.settings.get("system") or "")
