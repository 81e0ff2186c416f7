"""Figures as people read them: the fewest decimals with which two figures that differ do not look equal."""

from __future__ import annotations

import math
from typing import Any

from fsdpbench.check.metrics import METRICS

_MOST_DECIMALS = 17
_SMALLEST_PERCENT = 5e-5


def shown_pair(metric: str, before: Any, after: Any) -> tuple[str, str]:
    """Both in the metric's unit. Never the same text for two figures that are not the same."""
    for extra in range(_MOST_DECIMALS):
        first, second = (_shown(metric, value, extra) for value in (before, after))
        if first != second or before == after:
            return first, second
    return repr(before), repr(after)


def shown_percent(relative: float | None) -> str:
    """A signed share in percent; empty where there is none to tell."""
    if relative is None or not math.isfinite(relative):
        return ""
    if 0 < abs(relative) < _SMALLEST_PERCENT:
        return f"{relative * 100:+.1g}%"  # two decimals would tell it as none
    return f"{relative:+.2%}"


def _shown(metric: str, value: Any, extra: int) -> str:
    """`extra`: decimals more than usual."""
    if value is None:
        return "-"
    unit = METRICS[metric].unit if metric in METRICS else ""
    if unit == "s":
        return f"{value * 1e3:,.{4 + extra}f} ms"
    if unit == "B":
        return f"{value / 2**20:,.{2 + extra}f} MiB"
    return f"{value:.{6 + extra}g}" if isinstance(value, float) else str(value)
