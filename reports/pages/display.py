"""Figures as people read them: few digits, a thin space before the unit, a dash where nothing is known."""

from __future__ import annotations

import math
from typing import Any

GIB = 2**30
NOTHING = "–"  # An en dash: the device cannot know this figure.


def number(value: float | None, digits: int = 3) -> str:
    """Return `12,345`, `98.7`, `0.123`: `digits` significant, thousands grouped."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def gib(value: float | None) -> str:
    """Return bytes as GiB without the unit, one decimal (two below 1 GiB)."""
    if value is None:
        return NOTHING
    amount = value / GIB
    return f"{amount:.1f}" if abs(amount) >= 1 else f"{amount:.2f}"


def size(value: float | None) -> str:
    """Return bytes with the unit that suits them."""
    if value is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} TiB"


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds without the unit."""
    return NOTHING if seconds is None else ms(seconds * 1e3)


def ms(value: float) -> str:
    """Return milliseconds with three significant digits and at most three decimals."""
    return f"{value:.3f}" if 0 < abs(value) < 1 else number(value)


def percent(fraction: float | None, digits: int = 1) -> str:
    """Return a fraction as `54.3 %`."""
    return NOTHING if fraction is None or not math.isfinite(fraction) else f"{fraction * 100:.{digits}f} %"


def signed_percent(fraction: float) -> str:
    """Return a change as `+17 %` or `−4.2 %` (one decimal below 10 %)."""
    points = fraction * 100
    text = f"{abs(points):.0f}" if abs(points) >= 10 else f"{abs(points):.1f}"
    return f"{'−' if points < 0 else '+'}{text} %"


def count(value: float | None) -> str:
    """Return a count, whole where it is whole."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if float(value).is_integer() else number(value)


def parameters(value: float | None) -> str:
    """Return a model's size: `2.78 B`, `125 M`."""
    if value is None:
        return NOTHING
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{value:.0f}"


def setting(value: Any) -> str:
    """Return a setting's value as it is typed on the command line."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(setting(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{name}={setting(item)}" for name, item in value.items())
    return str(value)
