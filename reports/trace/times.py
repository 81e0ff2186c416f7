"""Microseconds to integer nanoseconds, without rounding errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from msgspec import Raw

from fsdpbench.reports.trace.model import Bool, Int64

LARGEST_EXACT_MICROSECONDS = 2.0**43
"""Up to here a double tells neighbouring nanoseconds apart (its steps are at most 0.001 us)."""
LARGEST_MICROSECONDS = 2.0**52
"""Times and durations beyond (142 years) are invalid; the sum of two fits into int64 nanoseconds."""


_WITH_DECIMALS = re.compile(rb'"ts"\s*:\s*\d+\.\d')
_SAMPLE = 16


def needs_digits(times: Iterable[float | None], text: bytes) -> bool:
    """Whether times decoded from this text have decimals that a double is too coarse for.

    The times of a trace are close together, so that a few of them show the magnitude of all.
    """
    some = max(islice((time for time in times if time), _SAMPLE), default=0.0)
    return some > LARGEST_EXACT_MICROSECONDS and _WITH_DECIMALS.search(text) is not None


def from_floats(times: Sequence[float | None]) -> tuple[Int64, Bool]:
    """int64 ns, and where there was a time at all (0 stands where there was none)."""
    microseconds = np.array(times, np.float64)  # None becomes nan
    present = np.abs(microseconds) < LARGEST_MICROSECONDS
    if not present.all():
        microseconds = np.where(present, microseconds, 0.0)
    whole = np.floor(microseconds)
    # Taken apart, the product cannot round: the fraction alone is scaled.
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64), present


def from_digits(times: Sequence[Raw]) -> tuple[Int64, Bool]:
    """The same from the numbers' text, for times that a double cannot hold."""
    ns = [_nanoseconds(bytes(time)) for time in times]
    present = np.fromiter((time is not None for time in ns), np.bool_, len(ns))
    return np.fromiter((time or 0 for time in ns), np.int64, len(ns)), present


def _nanoseconds(digits: bytes) -> int | None:
    whole, _, fraction = digits.partition(b".")
    try:
        if b"e" in digits or b"E" in digits:
            ns = _from_exponent(digits)
        elif fraction:
            ns = int(whole.lstrip(b"-") or b"0") * 1000 + int(fraction[:3].ljust(3, b"0"))
            ns = -ns if whole.startswith(b"-") else ns
        else:
            ns = int(whole) * 1000
    except ValueError:
        return None
    return ns if abs(ns) < LARGEST_MICROSECONDS * 1000 else None


def _from_exponent(digits: bytes) -> int:
    try:
        return round(float(digits) * 1000)
    except OverflowError:
        return 2**63
