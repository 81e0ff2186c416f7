"""Checks of a result: its figures against each other, and the result against its files and folder.

The rules are the rows of `result_rules.csv`. `left` and `right` are sums of products of figures (dotted names
in result.json) or functions of lists. `~` matches any part of a name; `@` is replaced by each word of `each`.
A rule applies on `device`, unless a figure of `unless` is known and not 0. Rows `within` are tolerances: a
share and an amount. The range of a figure is in its row of `reports.figures`. Unknown values break no rule.
"""

import contextlib
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from fsdpbench.base.files.documents import rows_beside
from fsdpbench.base.reading import one_line
from fsdpbench.reports.figures import ranges

Values = Mapping[str, Any]
Expression = Callable[[Values], Any]

WORDS = {
    "=": "and must be equal",
    "<=": "and the first must not be more",
    "zero with": "and neither is 0 without the other",
}
_OTHERS = {"environment", "verdict", "bench", "script", "placeholder_decisions", "rank_check", "sanitizer"}
_ABOUT_THE_FILE = {"schema", "name", "key", "command", "system_from", "model_from"}
_MOST_EXACT = 2.0**63
_MOST_KINDS = 32
"""Limit on the kinds of collectives checked: fewer exist, and a damaged file may name a million."""
_LONGEST_VALUE = 60
_KEY = re.compile(r"-([0-9a-f]{8})(\.run\d+)?$")
_PACKAGED = re.compile(r"[a-z0-9-]+")
_NAME = re.compile(r"[a-z_][a-z_0-9]*(?:\.[a-z_0-9~]+)*")
_CALL = re.compile(r"([a-z]+)\((.+)\)")
_OPERATORS = {" + ": operator.add, " - ": operator.sub, " * ": operator.mul, " / ": operator.truediv}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "median": median,
    "least": min,
    "greatest": max,
    "count": len,
    "sum": sum,
    "first": operator.itemgetter(0),
    "last": operator.itemgetter(-1),
    "medians": lambda runs: [median(run) for run in runs],
    "spread": lambda series: operator.sub(*quantiles(series, n=4, method="inclusive")[::-2]) / median(series),
}


@dataclass(frozen=True)
class Contradiction:
    """A set of `figures` that cannot all be true; `sentence` names both sides with their values."""

    figures: tuple[str, ...]
    sentence: str


@functools.cache
def rules() -> list[dict[str, str]]:
    """Return the rows of the table."""
    return rows_beside(__file__, "result_rules.csv")


def contradiction(result: Mapping[str, Any]) -> str | None:
    """Return the first contradiction in `result`, the content of a `result.json`; None if there is none."""
    return next((found.sentence for found in broken_rules(values_of(result))), None)


def broken_rules(values: Values) -> list[Contradiction]:
    """Return the contradictions in `values`, figures by name."""
    named = (name.split(".") for name in values)
    kinds = dict.fromkeys(parts[1] for parts in named if parts[0] == "communication" and parts[1:])
    found = [each for name, value in values.items() for each in _out_of_range(name, value)]
    for rule in rules():
        is_meant = rule["device"] in ("", "sim" if values.get("device") == "sim" else "real")
        is_meant &= not any(values.get(name) for name in rule["unless"].split())
        if rule["relation"] in WORDS and is_meant:
            words = [*kinds][:_MOST_KINDS] if rule["each"] == "each kind" else rule["each"].split() or ("",)
            found += [broken for each in words for broken in _broken(rule, each, values)]
    return found


def values_of(result: Mapping[str, Any]) -> dict[str, object]:
    """Return the leaves of `result` by dotted name, and the derived values that the rules use."""
    parts = {name: part for name, part in result.items() if name not in _OTHERS}
    values = {name: value for name, value in leaves(parts) if value is not None}
    model, hardware = str(values.get("config.model")), str(values.get("config.hardware"))
    checkpointing = values.get("config.settings.activation_checkpointing")
    steps: list[Any] = [values.get(f"config.measurement.{name}_steps", 1) for name in ("traced", "timed")]
    traced, timed = steps if all(map(_is_number, steps)) else (1, 1)
    values |= {
        "is_ok": int(result.get("status") == "ok"),
        "has_cause": int(result.get("cause") is not None),
        "is_sim": int(result.get("device") == "sim"),
        "has_retries": int(bool(values.get("alloc_retries_per_step"))),
        "recomputes": int(checkpointing != "none" or values.get("config.settings.loss") == "chunked"),
        "many_traced_steps": int(traced > 2),
        "untimed_traced_steps": int(traced > timed),
    }
    if model.startswith(("gpt", "llama", "decoder", "t5")):
        values["sequences_a_sample"] = 2 if model.startswith("t5") else 1
    if values["is_sim"] and _PACKAGED.fullmatch(hardware):
        values["packaged_profile"] = hardware
    for gathers in ("prefetched", "late"):
        count: Any = values.get(f"late_all_gathers.{gathers}")
        if _is_number(count) and traced > 0:
            values[f"{gathers}_all_gathers"] = count // traced if count % traced == 0 else count / traced
    samples = values.get("measured.step_times_s")
    if isinstance(samples, list) and samples and all(map(_is_number, samples)):
        values["fastest_step_s"] = min(samples)
    return with_sums(values)


def with_sums(values: Values) -> dict[str, object]:
    """Return `values` with the sums and differences of the traced step's parts that follow from them."""
    sums = {
        "compute_s": "time_s.compute_only + time_s.overlapped",
        "time_s.compute_only": "compute_s - time_s.overlapped",
        "communication_s": "time_s.overlapped + time_s.exposed_communication",
    }
    found = dict(values)
    parts = {name: value for name, value in values.items() if _is_number(value)}
    for name in sums.keys() - values.keys():
        with contextlib.suppress(LookupError):
            found[name] = _evaluated(sums[name])(parts)
    return found


def misfiled(folder: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Return why the `config.json` and `result.json` of a folder do not belong together; None if they do."""
    own, key = result.get("config", {}), config.get("key")
    if not isinstance(own, Mapping):
        return "result.json: config is not an object"
    if not own.keys() & config.keys():
        own = config = {}  # one of the files does not describe its configuration
    asked, ran = dict(leaves(config)), dict(leaves(own))
    for name in [name for name in ran | asked if name.partition(".")[0] not in _ABOUT_THE_FILE]:
        if asked.get(name) != ran.get(name):
            sides = _shown(asked.get(name)), _shown(ran.get(name))
            return f"{name} is {sides[0]} in config.json and {sides[1]} in result.json"
    found = _KEY.search(folder)
    if found and isinstance(key, str) and not key.startswith(found[1]):
        return f"the folder's name ends in {found[1]}, and the key in its config.json begins with {key[:8]}"
    return None


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested objects, by dotted name."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@functools.lru_cache(maxsize=4096)
def _limits(name: str) -> tuple[float, float] | None:
    """Return the least and greatest valid value of a figure; None if it has no range."""
    return next((limits for path, limits in ranges().items() if _pattern(path).fullmatch(name)), None)


@functools.cache
def _tolerances() -> dict[str, tuple[float, float]]:
    """Return the tolerances by name: a share of the larger side, and an amount."""
    rows = ((row["left"], row["right"].split()) for row in rules() if row["relation"] == "within")
    return {name: (float(share), float(amount)) for name, (share, amount) in rows}


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """Return a regular expression for a name in which `*` and `~` match any one part."""
    return re.compile(re.sub(r"\\[*~]|~", r"[^.]+", re.escape(text)))


def _out_of_range(name: str, value: Any) -> Iterator[Contradiction]:
    limits = _limits(name)
    if limits is None or value == {}:
        return
    for each in value if isinstance(value, list) else [value]:
        if not (_is_number(each) and limits[0] <= each <= min(limits[1], _MOST_EXACT)):
            limited = f"a number from {limits[0]:g} to {limits[1]:g}"
            yield Contradiction((name,), f"{name} is {_shown(each)}, and must be {limited}")
            return


def _broken(rule: Mapping[str, str], each: str, values: Values) -> Iterator[Contradiction]:
    texts = [rule[side].replace("@", each) for side in ("left", "right")]
    try:
        found = [_evaluated(text)(values) for text in texts]
        if not all(isinstance(each, str | list) or math.isfinite(each) for each in found):
            return  # rules do not apply to NaN and infinity
        holds = _holds(rule["relation"], rule["tolerance"], *found)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return  # unknown, or not a number: the latter breaks the figure's range
    if not holds:
        sides = [_told(text, value, values) for text, value in zip(texts, found, strict=True)]
        figures = dict.fromkeys(name for text in texts for name in _NAME.findall(text) if name in values)
        yield Contradiction(tuple(figures), f"{sides[0]} and {sides[1]}, {WORDS[rule['relation']]}")


def _holds(relation: str, tolerance: str, left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(_holds(relation, tolerance, *pair) for pair in pairs)
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    share, amount = _tolerances()[tolerance]
    margin = amount + share * max(abs(left), abs(right))
    if relation == "zero with":
        return bool(right == 0 if left == 0 else right != 0 or abs(left) <= margin)
    return bool(left - right <= margin and (relation == "<=" or right - left <= margin))


@functools.cache
def _evaluated(text: str) -> Expression:
    for sign, apply in _OPERATORS.items():
        head, found, tail = text.rpartition(sign)
        if found:
            left, right = _evaluated(head), _evaluated(tail)
            return lambda values, apply=apply: apply(left(values), right(values))  # type: ignore[misc]
    if call := _CALL.fullmatch(text):
        function, name = _FUNCTIONS[call[1]], call[2]
        return lambda values: function(_below(values, name) if "~" in name else values[name])
    return lambda values: float(text) if text[0].isdigit() else values[text]


def _below(values: Values, name: str) -> list[float]:
    """Return all values that `~` matches. Raises `LookupError` if one is not a number or none is known."""
    pattern = _pattern(name)
    found = [value for each, value in values.items() if pattern.fullmatch(each)]
    if not all(map(_is_number, found)) or not (found or values.get(name.partition(".~")[0]) == {}):
        raise LookupError(name)
    return found


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST_EXACT
    return whole or (isinstance(value, float) and math.isfinite(value))


def _told(text: str, value: Any, values: Values) -> str:
    """Return one side of a rule with its value; for a product also the values of its factors."""
    factors = [name for name in _NAME.findall(text) if name in values and not name.startswith("config.")]
    shown = ", ".join(f"{name} {_shown(values[name])}" for name in factors)
    is_product = " * " in text and "(" not in text and " + " not in text
    return f"{text} is {_shown(value)}" + (f" ({shown})" if is_product and factors else "")


def _shown(value: Any) -> str:
    return one_line(f"{value:.9g}" if isinstance(value, float) else str(value), _LONGEST_VALUE)
