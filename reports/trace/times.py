"""Microseconds to integer nanoseconds, without rounding errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Raw

from reports.trace.model import Bool, Int64

LARGEST_EXACT_MICROSECONDS = 2.0**43
"""Up to here a double tells neighbouring nanoseconds apart (its steps are at most 0.001 us)."""


_WITH_DECIMALS = re.compile(rb'"ts"\s*:\s*\d+\.\d')


def needs_digits(times: Iterable[float | None], text: bytes) -> bool:
    """Whether times decoded from this text have decimals that a double is too coarse for.

    The times of a trace lie close together, so one of them shows the magnitude of all.
    """
    one = next((time for time in times if time), 0.0)
    return one > LARGEST_EXACT_MICROSECONDS and _WITH_DECIMALS.search(text) is not None


def from_floats(times: Sequence[float | None]) -> tuple[Int64, Bool]:
    """int64 ns, and where there was a time at all (0 stands where there was none)."""
    microseconds = np.array(times, np.float64)  # None becomes nan
    present = np.isfinite(microseconds) & (np.abs(microseconds) < 2.0**53)
    if not present.all():
        microseconds = np.where(present, microseconds, 0.0)
    whole = np.floor(microseconds)
    # Taken apart, the product cannot round: the fraction alone is scaled.
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64), present


def from_digits(times: Sequence[Raw]) -> tuple[Int64, Bool]:
    """The same from the numbers' text, for times that a double cannot hold."""
    digits = [bytes(time) for time in times]
    present = np.fromiter(((text not in (b"", b"null")) for text in digits), np.bool_, len(digits))
    ns = (_nanoseconds(text) if text not in (b"", b"null") else 0 for text in digits)
    return np.fromiter(ns, np.int64, len(digits)), present


def _nanoseconds(digits: bytes) -> int:
    whole, _, fraction = digits.partition(b".")
    try:
        if not fraction:
            return int(whole) * 1000
        ns = int(whole.lstrip(b"-") or b"0") * 1000 + int(fraction[:3].ljust(3, b"0"))
    except ValueError:
        return round(float(digits) * 1000)  # an exponent: 1.5e3
    return -ns if whole.startswith(b"-") else ns
