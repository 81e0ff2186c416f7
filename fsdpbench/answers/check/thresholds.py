"""The changes that the gate allows: `thresholds.toml` (docs/gate.md).

`fsdpbench check --noise` measures the `minimum_effect` of a machine by A/A comparison and writes it there:
how much two sets of runs of the same code differ. Runs of a configuration are split at random, many times;
99 % of the splits differ by less than the minimum effect.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import numpy as np
from scipy.stats import mannwhitneyu

from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import check_names, replace_file, strictly
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.base.errors import CannotJudgeError, error_text
from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.reading import read_toml
from fsdpbench.engine.results.records import Status
from fsdpbench.reports.figures import Worse

USUAL_LEVEL = 0.01
USUAL_MINIMUM_EFFECT = 0.03
"""The default if noise was not measured: an effect that a quiet machine can detect."""

MOST_ALLOWED = 1.0
"""Maximum relative change. A larger value is probably meant in percent, and would let everything pass."""

_UNLISTED = {"B": (0.01 * 2**20, 1e-3), "s": (1e-8, 1e-8)}
"""For metrics that are not listed, by unit: a change counts if it reaches this absolute or relative size.
Times are sums of rounded nanoseconds, so their last digits depend on the order in which work is queued."""
_LEAST_LEVEL = 1e-9

_HEAD = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
"""The comment at the top of each thresholds file."""
Share = Annotated[float, msgspec.Meta(ge=0, le=MOST_ALLOWED)]
Level = Annotated[float, msgspec.Meta(ge=_LEAST_LEVEL, lt=1)]
_SPLITS = 500
_QUANTILE = 0.99
_FEWEST_RUNS = 6
_GRAIN = 0.001


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The significance level of tests on measured figures, and minimum effects by metric."""

    level: Level = USUAL_LEVEL
    minimum_effect: dict[str, Share] = {}


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: allowed relative changes by metric, and limits for measured figures."""

    relative_change: dict[str, Share] = {}
    measured: Measured = Measured()

    def allows(self, metric: str, before: float, after: float) -> bool:
        """Return whether the change of an exact figure is within its threshold."""
        change, share = abs(after - before), self.relative_change.get(metric)
        if share is not None:
            return change <= share * before
        least, least_share = _UNLISTED.get(METRICS[metric].unit, (0.0, 0.0))
        return change < min(least, least_share * before)

    def least_effect(self, metric: str) -> float:
        """Return the minimum relative effect of a measured figure that counts as a change."""
        return self.measured.minimum_effect.get(metric, USUAL_MINIMUM_EFFECT)

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises `BenchError`."""
        effects = self.measured.minimum_effect or None
        measured = {"level": self.measured.level, "minimum_effect": effects}
        tables = {"relative_change": self.relative_change, "measured": measured}
        replace_file(path, _HEAD + "\n" + to_toml(tables))


def read_thresholds(path: Path | None) -> Thresholds:
    """Read the thresholds from a file; defaults if it is None. Raises `UsageError` naming file and key."""
    if path is None:
        return Thresholds()
    content = read_toml(path)
    measured = content.get("measured")
    least = measured.get("minimum_effect") if isinstance(measured, dict) else None
    named = {"relative_change": content.get("relative_change"), "measured.minimum_effect": least}
    for where, table in named.items():
        if isinstance(table, dict):
            check_names(table, METRICS, str(path), where, "metric")
    return strictly(content, Thresholds, str(path))


@dataclass(frozen=True)
class Noise:
    """`effects`: by metric, the relative change that 99 % of A/A comparisons do not reach; `runs`: number."""

    effects: Mapping[str, float]
    runs: int

    def minimum_effects(self) -> dict[str, float]:
        """Return thresholds: the effects rounded up to 0.1 %, within the allowed range of thresholds."""
        return {
            name: round(min(MOST_ALLOWED, max(USUAL_MINIMUM_EFFECT, math.ceil(value / _GRAIN) * _GRAIN)), 4)
            for name, value in self.effects.items()
        }


def measure_noise(entries: Mapping[str, Entry]) -> Noise:
    """Return the noise of repeated runs. Metrics that are equal in all runs have none.

    Raises `CannotJudgeError` for simulated entries, for entries that failed or have invalid figures, and if
    there are too few runs to split.
    """
    if any(entry.is_exact for entry in entries.values()):
        raise CannotJudgeError("simulated figures are exact: there is no noise to measure")
    for name, entry in entries.items():
        if entry.status is not Status.OK:
            raise CannotJudgeError(f"{name}: ended with {entry.status.value}: there is no noise to measure")
        for figure, why in entry.flaws().items():
            raise CannotJudgeError(f"{name}: {figure} {why}")
    runs = min((len(entry.runs) for entry in entries.values()), default=0)
    if runs < _FEWEST_RUNS:
        raise CannotJudgeError(error_text("thresholds.runs", runs, _FEWEST_RUNS, _FEWEST_RUNS))
    generator = np.random.default_rng(0)
    effects: dict[str, float] = {}
    judged = [metric.name for metric in METRICS.values() if metric.worse is not Worse.NEITHER]
    for entry in entries.values():
        for metric in judged:
            values = entry.values(metric)
            if len(set(values)) > 1:
                effects[metric] = max(effects.get(metric, 0.0), _of_splits(values, generator))
    return Noise({name: value for name, value in effects.items() if math.isfinite(value)}, runs)


def _of_splits(values: Sequence[float], generator: np.random.Generator) -> float:
    half = len(values) // 2
    drawn = (generator.permutation(values).tolist() for _ in range(_SPLITS))
    found = [abs(effect(each[:half], each[half:])) for each in drawn]
    return float(np.quantile(found, _QUANTILE))


# Statistics to compare two samples of runs: a rank test, the effect size, and a correction for many tests.
# A rank test, because run times have long tails and are not normally distributed; an effect size, because
# with enough runs any difference is significant; Holm's correction, because ten metrics at level 0.01 raise a
# false alarm in one of ten comparisons.


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the two-sided p-value of Mann and Whitney's rank test (1947): the probability of ranks at least
    as uneven as these if both samples have the same distribution. Exact for small samples without ties."""
    if len(set(before) | set(after)) == 1:
        return 1.0
    return float(mannwhitneyu(before, after, alternative="two-sided").pvalue)


def least_p_value(before: int, after: int) -> float:
    """Return the smallest possible p-value for these numbers of runs: all of one below all of the other."""
    return 2 / math.comb(before + after, before)


def runs_needed(level: float) -> int:
    """Return the number of runs per side that the test needs to be able to reach `level`."""
    runs = 2
    while least_p_value(runs, runs) > level:
        runs += 1
    return runs


def effect(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the relative change (0.1: 10 % more): the median of all differences between a run after and one
    before (Hodges and Lehmann's estimate, 1963), divided by the median before. Infinite if that is 0."""
    shift = float(np.median(np.subtract.outer(np.asarray(after), np.asarray(before))))
    if shift == 0.0:
        return 0.0
    base = abs(median(before))
    return shift / base if base else math.copysign(math.inf, shift)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number (Holm, 1979), in the same order. Comparing each with a
    level keeps the probability of any false alarm among them below that level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    greatest = 0.0
    for rank, i in enumerate(order):
        greatest = max(greatest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = greatest
    return adjusted
