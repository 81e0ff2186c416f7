"""The changes that the gate allows: `thresholds.toml` (docs/gate.md).

`fsdpbench check --noise` measures the `minimum_effect` of a machine and writes it there: A against A, how far
two sets of runs of the same code differ. Runs of a configuration are split by chance, many times; 99 % of the
splits stay below the minimum effect.
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
"""Where the noise was not measured: what a quiet machine can tell from it."""

MOST_ALLOWED = 1.0
"""Of a relative change. More is a percentage taken for a share, and a gate that lets everything pass."""

_UNLISTED = {"B": (0.01 * 2**20, 1e-3), "s": (1e-8, 1e-8)}
"""By unit, the change and the share below which a metric that is not listed has not changed. Times are sums
of rounded nanoseconds, so the order in which work is queued moves their last digits."""
_LEAST_LEVEL = 1e-9

_HEAD = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
"""Begins each file of thresholds."""
Share = Annotated[float, msgspec.Meta(ge=0, le=MOST_ALLOWED)]
Level = Annotated[float, msgspec.Meta(ge=_LEAST_LEVEL, lt=1)]
_SPLITS = 500
_QUANTILE = 0.99
_FEWEST_RUNS = 6
_GRAIN = 0.001


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The level of the tests on measured figures, and the least effects by metric."""

    level: Level = USUAL_LEVEL
    minimum_effect: dict[str, Share] = {}


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: relative changes by metric, and what counts of measured figures."""

    relative_change: dict[str, Share] = {}
    measured: Measured = Measured()

    def allows(self, metric: str, before: float, after: float) -> bool:
        """Return whether that change of an exact figure is not a regression."""
        change, share = abs(after - before), self.relative_change.get(metric)
        if share is not None:
            return change <= share * before
        least, least_share = _UNLISTED.get(METRICS[metric].unit, (0.0, 0.0))
        return change < min(least, least_share * before)

    def least_effect(self, metric: str) -> float:
        """Return the least effect that counts, as a share, of a figure with a distribution."""
        return self.measured.minimum_effect.get(metric, USUAL_MINIMUM_EFFECT)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises `BenchError`."""
        effects = self.measured.minimum_effect or None
        measured = {"level": self.measured.level, "minimum_effect": effects}
        tables = {"relative_change": self.relative_change, "measured": measured}
        replace_file(path, _HEAD + "\n" + to_toml(tables))


def read_thresholds(path: Path | None) -> Thresholds:
    """Return the thresholds in a file; without one the usual. Raises `UsageError` naming file and key."""
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
    """`effects`: the relative change that 99 % of A/A comparisons stay below, by metric; `runs` of each."""

    effects: Mapping[str, float]
    runs: int

    def minimum_effects(self) -> dict[str, float]:
        """Return thresholds: the effects rounded up to 0.1 %, within what thresholds may be."""
        return {
            name: round(min(MOST_ALLOWED, max(USUAL_MINIMUM_EFFECT, math.ceil(value / _GRAIN) * _GRAIN)), 4)
            for name, value in self.effects.items()
        }


def measure_noise(entries: Mapping[str, Entry]) -> Noise:
    """Return the noise of repeated runs. Metrics that were equal in all runs have none.

    Raises `CannotJudgeError` for simulated entries, for what failed or has impossible figures, and where
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


# Whether two samples of runs differ: a rank test, how large the difference is, and many tests at the same
# time.
# Ranks, because run times have long tails and no normal distribution; an effect, because with enough runs any
# difference is certain; Holm's correction, because ten metrics at level 0.01 raise one false alarm in ten.


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Two-sided, of Mann and Whitney's rank test (1947): the chance of ranks as uneven as these, or more so,
    if both samples come from one distribution. Exact for small samples without ties."""
    if len(set(before) | set(after)) == 1:
        return 1.0
    return float(mannwhitneyu(before, after, alternative="two-sided").pvalue)


def least_p_value(before: int, after: int) -> float:
    """Return the least p-value of so many runs on each side: all of one below all of the other."""
    return 2 / math.comb(before + after, before)


def runs_needed(level: float) -> int:
    """Runs a side with which the test can reach `level` at all."""
    runs = 2
    while least_p_value(runs, runs) > level:
        runs += 1
    return runs


def effect(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the relative change (0.1: a tenth more): the median of all differences between a run after and
    one before (Hodges and Lehmann's estimate, 1963) over the median before. Infinite if that is 0."""
    shift = float(np.median(np.subtract.outer(np.asarray(after), np.asarray(before))))
    if shift == 0.0:
        return 0.0
    base = abs(median(before))
    return shift / base if base else math.copysign(math.inf, shift)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number (Holm, 1979), in the same order: comparing each with a
    level keeps the chance of any false alarm among them below it."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    greatest = 0.0
    for rank, i in enumerate(order):
        greatest = max(greatest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = greatest
    return adjusted
