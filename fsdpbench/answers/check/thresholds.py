"""The changes that the gate allows: `thresholds.toml` (docs/gate.md).

`fsdpbench check --noise` measures the `minimum_effect` of a machine and writes it there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from fsdpbench.answers.check.metrics import METRICS
from fsdpbench.answers.check.records.baseline import replace_file
from fsdpbench.answers.check.records.strict import check_names, strictly
from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.reading import read_toml

USUAL_LEVEL = 0.01
USUAL_MINIMUM_EFFECT = 0.03
"""Where the noise was not measured: what a quiet machine can tell from it."""

MOST_ALLOWED = 1.0
"""Of a relative change. More is a percentage taken for a share, and a gate that lets everything pass."""

_UNLISTED = {"B": (0.01 * 2**20, 1e-3), "s": (1e-8, 1e-8)}
"""By unit, the change and the share below which a metric that is not listed has not changed. Times are sums
of rounded nanoseconds, so the order in which work is queued moves their last digits."""
_LEAST_LEVEL = 1e-9

_HEAD = """\
# What the performance gate allows (docs/gate.md).
# relative_change: of exact figures, such as simulated ones; where a metric is not listed none, but of
# bytes less than 0.01 MiB and a thousandth, of times less than 10 ns and 1e-8 of them.
# measured: level is the chance of a false alarm, minimum_effect the relative change below which none is.
"""

Share = Annotated[float, msgspec.Meta(ge=0, le=MOST_ALLOWED)]
Level = Annotated[float, msgspec.Meta(ge=_LEAST_LEVEL, lt=1)]


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
