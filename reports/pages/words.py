"""Settings as people of the field say them: column headers, values in a table, phrases in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpbench.reports.pages.display import NOTHING, setting

_HEADERS = {
    "activation_checkpointing": "checkpointing",
    "backward_prefetch": "backward prefetch",
    "limit_all_gathers": "limiter",
    "reduce_dtype": "reduce",
    "param_dtype": "compute",
    "reshard_after_forward": "reshard",
    "grad_accum": "accumulation",
}
_AS_THEY_ARE = ("system", "model", "strategy", "hardware", "optimizer")
_AFTER = {"activation_checkpointing": "checkpointing", "reduce_dtype": "reduction", "param_dtype": "compute"}
_WITHOUT = ("none", "off", "0", "false", NOTHING)
MOST_WORDS = 25


def header(name: str) -> str:
    """Return a setting's name as the header of a column."""
    return _HEADERS.get(name, name.replace("_", " "))


def in_table(name: str, value: Any) -> str:
    """Return a setting's value below its header."""
    text = setting(value)
    if name == "compile":
        return {"true": "compiled", "false": "eager"}.get(text, text)
    return {"true": "yes", "false": "no"}.get(text, text)


def phrase(name: str, value: Any) -> str:
    """Return a setting and its value in a sentence: `batch 12`, `op checkpointing`, `no limiter`."""
    text = setting(value)
    if name == "compile" or name in _AS_THEY_ARE:
        return in_table(name, value)
    if text in _WITHOUT:
        return f"no {_AFTER.get(name, header(name))}"
    if name in _AFTER:
        return f"{text} {_AFTER[name]}"
    return header(name) if text == "true" else f"{header(name)} {text}"


def varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names of the settings with at least two values over the rows, in the order of first sight."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            seen.setdefault(name, set()).add(setting(value))
    return [name for name, values in seen.items() if len(values) > 1]


def within(parts: Sequence[str], most: int = MOST_WORDS) -> str:
    """Return the first of the parts, and as many more of them as leave at most `most` words in all."""
    text = parts[0]
    for part in parts[1:]:
        text += part if len((text + part).split()) <= most else ""
    return text
