"""Numbers that people write, within bounds: whole ones of 64 bits, finite ones of floating point."""

from __future__ import annotations

import math

from fsdpbench.reports.reading import LARGEST_INTEGER as LARGEST_INTEGER

MOST_GPUS = 1 << 20
"""Far above any cluster; what is listed for each rank (meshes, groups) takes seconds there."""
_MOST_DIGITS = 40
"""More is not even read: Python refuses some thousand digits, and before that takes its time."""


def whole_number(text: str, least: int = -LARGEST_INTEGER, most: int = LARGEST_INTEGER) -> int:
    """The number in `text`. Raises `ValueError` that says the bound which it does not keep."""
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"not a whole number up to {bound(most)}")
    number = int(text)
    if number < least:
        raise ValueError(f"at least {least}")
    if number > most:
        raise ValueError(f"at most {bound(most)}")
    return number


def finite_number(text: str) -> float:
    """The number in `text`. Raises `ValueError` for other text, and for nan and infinities."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def bound(number: int) -> str:
    """A bound as people read it."""
    return "2^63-1" if number == LARGEST_INTEGER else f"{number:,}"
