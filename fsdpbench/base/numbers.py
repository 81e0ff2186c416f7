"""Numbers in text from outside: ASCII digits, within bounds, and with a unit where one is required.

Python's `int` and `float` accept more (`+1`, `1_0`, digits of every script, `infinity`, white space), so all
text from outside is converted to numbers here (`tests/docs/test_writers.py` checks that).
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

LARGEST_INTEGER = 2**63 - 1
MOST_GPUS = 1 << 20
"""Maximum number of GPUs, far above any cluster; lists of that many ranks (meshes, groups) take seconds."""
_MOST_DIGITS = 40
"""Python refuses numbers of some thousand digits, and is slow well below that."""
_WHOLE = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]+)?")
_WITH_UNIT = re.compile(r"(.*[0-9.])\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def whole_number(text: str, least: int = -LARGEST_INTEGER, most: int = LARGEST_INTEGER) -> int:
    """Return the number in `text`. Raise `ValueError`, which names the violated bound."""
    if len(text) > _MOST_DIGITS or not _WHOLE.fullmatch(text):
        raise ValueError(f"not a whole number up to {bound(most)}")
    number = int(text)
    if number < least:
        raise ValueError(f"at least {least}")
    if number > most:
        raise ValueError(f"at most {bound(most)}")
    return number


def finite_number(text: str) -> float:
    """Return the number in `text`. Raise `ValueError` for other text, or if it exceeds a double."""
    if not _DECIMAL.fullmatch(text) or not math.isfinite(number := float(text)):
        raise ValueError("expected a finite number")
    return number


def with_unit(text: str, units: Mapping[str, int]) -> int:
    """Return the number in `text` times its unit, in any case (`80GB`, `40 GiB`). Raise `ValueError`."""
    found = _WITH_UNIT.fullmatch(text)
    if found is None or found[2].lower() not in units:
        raise ValueError(f"expected a number, and one of {', '.join(filter(None, units))}")
    product = finite_number(found[1]) * units[found[2].lower()]
    if not math.isfinite(product):
        raise ValueError("expected a finite number")
    return round(product)


def proc_figure(file: str, name: str) -> int | None:
    """Return the number after `name` in a file of `/proc`; None if the system does not report it."""
    try:
        lines = map(str.split, Path("/proc", file).read_text().splitlines())
        return next((int(words[1]) for words in lines if words and words[0] == name), None)
    except (OSError, ValueError, IndexError):
        return None


def bound(number: int) -> str:
    """Return a bound as error messages show it."""
    return "2^63-1" if number == LARGEST_INTEGER else f"{number:,}"
