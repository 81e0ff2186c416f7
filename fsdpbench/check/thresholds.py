"""What the gate allows: `thresholds.toml`.

    [relative_change]          exact figures: relative change that is no regression (0.01: one per cent)
    peak_reserved_bytes = 0.01

    [measured]                 figures with a distribution over runs
    level = 0.01               chance of a false alarm in a whole comparison
    minimum_effect = { step_time_s = 0.03 }    smaller changes are no regression, however certain

`fsdpbench check --noise` measures the `minimum_effect` of a machine and writes it here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpbench.check.metrics import METRICS
from fsdpbench.errors import UsageError
from fsdpbench.reading import read_toml
from fsdpbench.toml_text import to_toml

USUAL_LEVEL = 0.01
USUAL_MINIMUM_EFFECT = 0.03
"""Where nobody measured the noise: what a quiet machine can tell from it."""

_HEAD = """\
# What the performance gate allows (docs/architecture.md, "The gate").
# relative_change: of exact figures, such as simulated ones; none where a metric is not listed.
# measured: level is the chance of a false alarm, minimum_effect the relative change below which
# none is raised.
"""


@dataclass(frozen=True)
class Thresholds:
    """Relative changes by metric, and the level of the tests on measured figures."""

    relative_change: Mapping[str, float] = field(default_factory=dict)
    level: float = USUAL_LEVEL
    minimum_effect: Mapping[str, float] = field(default_factory=dict)

    def allowed(self, metric: str) -> float:
        """Of an exact figure."""
        return self.relative_change.get(metric, 0.0)

    def least_effect(self, metric: str) -> float:
        """Of a figure with a distribution."""
        return self.minimum_effect.get(metric, USUAL_MINIMUM_EFFECT)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        measured = {"level": self.level, "minimum_effect": dict(self.minimum_effect) or None}
        text = _HEAD + "\n" + to_toml({"relative_change": dict(self.relative_change), "measured": measured})
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        os.replace(partial, path)


def read_thresholds(path: Path | None) -> Thresholds:
    """The thresholds in a file; without one, the usual ones. Raises `UsageError` naming file and key."""
    if path is None:
        return Thresholds()
    content = read_toml(path)
    measured = _table(path, content, "measured")
    level = measured.get("level", USUAL_LEVEL)
    if not isinstance(level, int | float) or isinstance(level, bool) or not 0 < level < 1:
        raise UsageError(f"{path}: measured.level must be a chance between 0 and 1, not {level!r}")
    return Thresholds(
        _changes(path, _table(path, content, "relative_change"), "relative_change"),
        float(level),
        _changes(path, _table(path, measured, "minimum_effect"), "measured.minimum_effect"),
    )


def _table(path: Path, content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: {name} must be a table, not {table!r}")
    return table


def _changes(path: Path, table: Mapping[str, Any], where: str) -> dict[str, float]:
    for name, value in table.items():
        if name not in METRICS:
            raise UsageError(f"{path}: {where}.{name} is no metric; known: {', '.join(METRICS)}")
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{path}: {where}.{name} must be a number from 0 up, not {value!r}")
    return {name: float(value) for name, value in table.items()}
