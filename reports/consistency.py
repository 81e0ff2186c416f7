"""Checks a result against itself, its configuration's file and its folder.

A figure that is broken often still looks like one: a peak of 5 bytes, a step of another configuration. Beside
the others it cannot be true. The rules are the table of `result_rules.py`; here they are evaluated.

    names of figures    dotted paths in result.json: time_s.idle, communication.all_gather.count
    a key without value not known: no rule speaks of it, so that results of older schemas stay consistent
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from fsdpbench.reports.outside_text import one_line
from fsdpbench.reports.result_rules import EVERY_KIND, ONE_SEQUENCE, RANGES, RULES, TWO_SEQUENCES, Rule

Values = Mapping[str, Any]
Expression = Callable[[Values], Any]

_NOT_FIGURES = (
    "environment",
    "verdict",
    "bench",
    "script",
    "placeholder_decisions",
    "rank_check",
    "sanitizer",
)
_LARGEST = 2.0**63
_SHOWN_DIGITS = 60
_KEY_DIGITS = 8
_PACKAGED = re.compile(r"[a-z0-9-]+")
_FOLDER = re.compile(rf"-([0-9a-f]{{{_KEY_DIGITS}}})(\.run\d+)?$")


@dataclass(frozen=True)
class Contradiction:
    """`figures` cannot all be true; `sentence` names both sides with their values."""

    figures: tuple[str, ...]
    sentence: str


def contradictions(result: Mapping[str, Any]) -> list[Contradiction]:
    """Return what in `result`, the content of a `result.json`, cannot be true."""
    values = values_of(result)
    return [*_out_of_range(values), *broken_rules(values)]


def broken_rules(values: Values) -> list[Contradiction]:
    """Return the rules that `values`, figures by name, break."""
    named = (name.split(".") for name in values)
    kinds = tuple(dict.fromkeys(parts[1] for parts in named if parts[0] == "communication" and parts[1:]))
    return [found for rule in RULES for found in _broken(rule, values, kinds)]


def values_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return every leaf of `result` by its dotted path, and the figures that only sums of them are."""
    values = dict(_leaves({key: value for key, value in result.items() if key not in _NOT_FIGURES}, ""))
    values |= _derived(result, values)
    parts = [values.get(f"time_s.{part}") for part in ("compute_only", "overlapped")]
    if all(map(_is_number, parts)):
        values["compute_s"] = sum(parts)  # type: ignore[arg-type]
    samples = values.get("measured.step_times_s")
    if _is_series(samples):
        values["fastest_step_s"] = min(samples)
    return values


def _derived(result: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """What rules need besides the figures of the file: conditions as 0 and 1, and what names stand for."""
    model, hardware = str(values.get("config.model")), str(values.get("config.hardware"))
    steps = [values.get(f"config.measurement.{name}_steps", 0) for name in ("traced", "timed")]
    derived: dict[str, Any] = {
        "is_ok": int(result.get("status") == "ok"),
        "has_cause": int(result.get("cause") is not None),
        "is_sim": int(result.get("device") == "sim"),
        "many_traced_steps": int(steps[0] > 2),
        "untimed_traced_steps": int(steps[0] > steps[1]),
    }
    if values.get("alloc_retries_per_step"):
        derived["has_retries"] = 1
    if model.startswith(ONE_SEQUENCE + TWO_SEQUENCES):
        derived["sequences_a_sample"] = 2 if model.startswith(TWO_SEQUENCES) else 1
    if values.get("device") == "sim" and _PACKAGED.fullmatch(hardware):
        derived["packaged_profile"] = hardware
    return derived


def misfiled(folder: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Return why `config.json` and `result.json` of the folder of this name do not belong together; None if
    they do."""
    own = result.get("config", {})
    if not isinstance(own, Mapping):
        return "result.json: config is not an object"
    for name, (asked, ran) in _differing(config, own, ""):
        return (
            f"config.json and result.json disagree: {name} is {_shown(asked)} in config.json and {_shown(ran)} "
            "in result.json, which belongs to another configuration"
        )
    found, key = _FOLDER.search(folder), config.get("key")
    if found and isinstance(key, str) and not key.startswith(found[1]):
        return f"the folder is named {found[1]}, and config.json has the key {_shown(key[:_KEY_DIGITS])}"
    return None


def _differing(
    config: Mapping[str, Any], own: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Settings that both files have with another value, by dotted name."""
    for name in own.keys() & config.keys():
        asked, ran = config[name], own[name]
        if isinstance(asked, Mapping) and isinstance(ran, Mapping) and asked.keys() == ran.keys():
            yield from _differing(asked, ran, f"{prefix}{name}.")
        elif asked != ran:
            yield f"{prefix}{name}", (asked, ran)


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _out_of_range(values: Values) -> Iterator[Contradiction]:
    for name, value in values.items():
        allowed = _range_of(name)
        if allowed is None or value == {}:
            continue
        least, most = allowed
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not (_is_number(each) and least <= each <= min(most, _LARGEST)):
                told = f"{name} is {_shown(each)}, and a number from {least:g}"
                told += f" to {most:g}" if math.isfinite(most) else ""
                yield Contradiction((name,), f"{told} was expected")
                break


@functools.cache
def _range_of(name: str) -> tuple[float, float] | None:
    return next((limits for pattern, limits in RANGES.items() if _pattern(pattern).fullmatch(name)), None)


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """`*` stands for one part of a name."""
    return re.compile(re.escape(text).replace(r"\*", r"[^.]+"))


def _broken(rule: Rule, values: Values, kinds: tuple[str, ...]) -> Iterator[Contradiction]:
    """`kinds`: of collectives."""
    if rule.device not in ("any", "sim" if values.get("device") == "sim" else "real"):
        return
    if any(values.get(name) for name in rule.unless):
        return
    for each in kinds if rule.each == EVERY_KIND else rule.each or ("",):
        left, right = _sides(rule, each)
        try:
            found = (left(values), right(values))
        except (LookupError, TypeError, ValueError, ArithmeticError):
            continue  # a figure that is not known, or not one: that is said elsewhere
        if not rule.holds(*found):
            yield _contradiction(rule, each, values, found)


_NAME = re.compile(r"[a-z_][a-z_0-9]*(?:\.[a-z_0-9~]+)*")
_CALL = re.compile(r"([a-z]+)\((.+)\)")
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "median": median,
    "least": min,
    "greatest": max,
    "first": lambda series: series[0],
    "last": lambda series: series[-1],
    "count": len,
    "sum": sum,
    "medians": lambda runs: [median(run) for run in runs],
    "spread": lambda series: (lambda q: (q[2] - q[0]) / median(series))(
        quantiles(series, n=4, method="inclusive")
    ),
}


@functools.cache
def _sides(rule: Rule, each: str) -> tuple[Expression, Expression]:
    return _evaluated(rule.left.replace("@", each)), _evaluated(rule.right.replace("@", each))


def _evaluated(text: str) -> Expression:
    """Compile a sum of products: `a * b / c + median(d) - 1`."""
    for sign, apply in ((" + ", lambda a, b: a + b), (" - ", lambda a, b: a - b)):
        head, found, tail = text.rpartition(sign)
        if found:
            return _applied(apply, _evaluated(head), _evaluated(tail))
    for sign, apply in ((" * ", lambda a, b: a * b), (" / ", lambda a, b: a / b)):
        head, found, tail = text.rpartition(sign)
        if found:
            return _applied(apply, _evaluated(head), _evaluated(tail))
    return _atom(text)


def _applied(apply: Callable[[Any, Any], Any], left: Expression, right: Expression) -> Expression:
    return lambda values: apply(left(values), right(values))


def _atom(text: str) -> Expression:
    call = _CALL.fullmatch(text)
    if call:
        function, name = _FUNCTIONS[call[1]], call[2]
        if "~" in name:
            return lambda values: function(_below(values, name))
        return lambda values: function(values[name])
    if text[0].isdigit():
        return lambda values: float(text)
    return lambda values: values[text]


def _below(values: Values, name: str) -> list[float]:
    """The values in the place of `~`. Raises `LookupError` where one is no number, or nothing is known of them."""
    pattern, whole = _pattern(name.replace("~", "*")), name.partition(".~")[0]
    found = [value for each, value in values.items() if pattern.fullmatch(each)]
    if not all(map(_is_number, found)) or not (found or values.get(whole) == {}):
        raise LookupError(name)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_series(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _contradiction(rule: Rule, each: str, values: Values, found: tuple[Any, Any]) -> Contradiction:
    texts = [side.replace("@", each) for side in (rule.left, rule.right)]
    told, figures = [], []
    for text, value in zip(texts, found, strict=True):
        names = [name for name in dict.fromkeys(_NAME.findall(text)) if name in values]
        figures += names
        parts = ", ".join(f"{name} {_shown(values[name])}" for name in names)
        told.append(f"{text} is {_shown(value)}" + (f" ({parts})" if names and names != [text] else ""))
    return Contradiction(tuple(dict.fromkeys(figures)), f"{' and '.join(told)}, {rule.words}")


def _shown(value: Any) -> str:
    return one_line(f"{value:.9g}" if isinstance(value, float) else str(value), _SHOWN_DIGITS)
