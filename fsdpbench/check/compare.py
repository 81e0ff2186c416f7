"""Compares the figures of a sweep with a baseline's, configuration by configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdpbench.check.metrics import METRICS, Worse


class Verdict(StrEnum):
    """What one figure's change means."""

    WORSE = "worse"
    BETTER = "better"
    ALLOWED = "allowed"


@dataclass(frozen=True)
class Change:
    """One figure that differs. `before` or `after` is `None` where it was not known."""

    configuration: str
    metric: str
    before: Any
    after: Any
    verdict: Verdict

    @property
    def relative(self) -> float | None:
        """(after - before) / before, where both are numbers and before is not 0."""
        if isinstance(self.before, int | float) and isinstance(self.after, int | float) and self.before:
            return (self.after - self.before) / self.before
        return None


@dataclass(frozen=True)
class Comparison:
    """All changes, and configurations that only one side has."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    compared: int

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict is Verdict.WORSE)


def compare(
    baseline: Mapping[str, Mapping[str, Any]],
    current: Mapping[str, Mapping[str, Any]],
    allowed: Mapping[str, float],
) -> Comparison:
    """Both map configuration names to {"status", figures}; `allowed` is the relative change a metric may
    take."""
    changes: list[Change] = []
    both = [name for name in baseline if name in current]
    for name in both:
        changes += _changes(name, baseline[name], current[name], allowed)
    return Comparison(
        changes=tuple(changes),
        missing=tuple(name for name in baseline if name not in current),
        added=tuple(name for name in current if name not in baseline),
        compared=len(both),
    )


def _changes(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], allowed: Mapping[str, float]
) -> list[Change]:
    if before["status"] != after["status"]:
        verdict = Verdict.WORSE if before["status"] == "ok" else Verdict.BETTER
        return [Change(name, "status", before["status"], after["status"], verdict)]
    changes = []
    for metric in METRICS:
        old, new = before.get(metric), after.get(metric)
        if old != new:
            changes.append(Change(name, metric, old, new, _judge(metric, old, new, allowed.get(metric, 0.0))))
    return changes


def _judge(metric: str, old: float | None, new: float | None, allowed: float) -> Verdict:
    if old is None or new is None:
        # A kind of collective that was not there before costs something; one that is gone costs nothing.
        return Verdict.WORSE if old is None else Verdict.BETTER
    if abs(new - old) <= allowed * abs(old):
        return Verdict.ALLOWED
    higher_is_worse = METRICS[metric].worse is Worse.HIGHER
    return Verdict.WORSE if (new > old) == higher_is_worse else Verdict.BETTER
