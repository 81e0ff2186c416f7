"""Text of figures and settings. Figures: few digits, a thin space before the unit, a dash if unknown.
Settings: the terms of the field, as column headers, values in a table and phrases in a sentence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpbench.base.files.documents import table_beside

GIB = 2**30
NOTHING = "–"  # An en dash: the device cannot know this figure.
WORDS = table_beside(__file__, "words.toml")
_HEADERS = WORDS["headers"]
_AS_THEY_ARE = ("system", "model", "strategy", "hardware", "optimizer")
_AFTER = {"activation_checkpointing": "checkpointing", "reduce_dtype": "reduction", "param_dtype": "compute"}
_WITHOUT = ("none", "off", "0", "false", NOTHING)
MOST_WORDS = 25


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
    """Return bytes in a suitable unit."""
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
    """Return a count, without decimals if it is whole."""
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
    """Return a setting's value as typed on the command line."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(setting(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{name}={setting(item)}" for name, item in value.items())
    return str(value)


def header(name: str) -> str:
    """Return a setting's name as the header of a column."""
    return _HEADERS.get(name, name.replace("_", " "))


def in_table(name: str, value: Any) -> str:
    """Return a setting's value as shown in a table."""
    text = setting(value)
    if name == "compile":
        return {"true": "compiled", "false": "eager"}.get(text, text)
    return {"true": "yes", "false": "no"}.get(text, text)


def phrase(name: str, value: Any) -> str:
    """Return a setting and its value as a phrase: `batch 12`, `op checkpointing`, `no limiter`."""
    text = setting(value)
    if name == "compile" or name in _AS_THEY_ARE:
        return in_table(name, value)
    if text in _WITHOUT:
        return f"no {_AFTER.get(name, header(name))}"
    if name in _AFTER:
        return f"{text} {_AFTER[name]}"
    return header(name) if text == "true" else f"{header(name)} {text}"


def varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings with at least two values over the rows, in order of first appearance."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            seen.setdefault(name, set()).add(setting(value))
    return [name for name, values in seen.items() if len(values) > 1]


def within(parts: Sequence[str], most: int = MOST_WORDS) -> str:
    """Return the first part, and each further part that keeps the total within `most` words."""
    text = parts[0]
    for part in parts[1:]:
        text += part if len((text + part).split()) <= most else ""
    return text
