"""Effects of compiling: configurations that differ in `compile` alone, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdpbench.reports.pages.display import count, gib, milliseconds, setting, signed_percent
from fsdpbench.reports.pages.ranking import Ranked, label
from fsdpbench.reports.pages.view import Configuration
from fsdpbench.reports.pages.whole_run import Table

_NAME = "compile"
_MOST_PAIRS = 6
_PHASES = {
    "before the trace": "parameters, optimizer state",
    "forward": "held since forward",
    "backward": "taken in backward",
    "optimizer": "taken by the optimizer",
}


Pair = tuple[Configuration, Configuration]
"""The eager and the compiled configuration of otherwise equal settings; both finished."""


def compiled_pairs(ranked: Sequence[Ranked]) -> list[Pair]:
    """Return all pairs, those of the best configurations first."""
    rows = [entry.row for entry in ranked if entry.throughput and entry.row.result.step_time_s]
    eager = {_rest(row): row for row in rows if setting(row.settings.get(_NAME)) == "false"}
    compiled = [row for row in rows if setting(row.settings.get(_NAME)) == "true"]
    pairs = [(eager[_rest(row)], row) for row in compiled if _rest(row) in eager]
    places = {id(row): place for place, row in enumerate(rows)}
    return sorted(pairs, key=lambda pair: min(places[id(row)] for row in pair))


def _rest(row: Configuration) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, setting(value)) for name, value in row.settings.items() if name != _NAME))


def fusion_table(
    ranked: Sequence[Ranked], varying: Sequence[str], held: Mapping[str, Mapping[str, int]]
) -> Table | None:
    """Return a row for each figure of each pair; None where nothing was tried both ways. `held`: bytes alive
    at the peak of each folder's trace, by the phase that took them."""
    lines: list[tuple[str, ...]] = []
    others = [name for name in varying if name != _NAME]
    for pair in compiled_pairs(ranked)[:_MOST_PAIRS]:
        title = label(pair[0], others)
        for name, before, after, words in _figures(pair, held):
            change = signed_percent(after / before - 1) if before else ""
            lines.append((title, name, words(before), words(after), change))
    return Table.of(("configuration", "figure", "eager", "compiled", "change"), lines)


def _figures(
    pair: Pair, held: Mapping[str, Mapping[str, int]]
) -> list[tuple[str, float, float, Callable[[float], str]]]:
    """Return name, both values and format of each figure that both sides know."""
    asked: tuple[tuple[str, Callable[[Configuration], float | None], Callable[[float], str]], ...] = (
        ("step time, ms", lambda row: row.result.step_time_s, milliseconds),
        ("kernels a step", lambda row: _of(row.result.work, "kernels"), count),
        ("copies a step", lambda row: _of(row.result.work, "copies"), count),
        (
            "read and written a step by kernels that memory limits, GiB",
            lambda row: _of(row.result.memory_traffic, "bytes"),
            gib,
        ),
        ("reserved, GiB", lambda row: row.result.reserved, gib),
    )
    found: list[tuple[str, float, float, Callable[[float], str]]] = []
    for name, value, words in asked:
        before, after = map(value, pair)
        if before is not None and after is not None:
            found.append((name, before, after, words))
    eager, compiled = (held.get(row.folder.name, {}) for row in pair)
    if eager and compiled:
        for phase in dict.fromkeys([*eager, *compiled]):
            title = f"at the peak, {_PHASES.get(phase, phase)}, GiB"
            found.append((title, eager.get(phase, 0), compiled.get(phase, 0), gib))
    return found


def _of(figures: Mapping[str, Any] | None, name: str) -> float | None:
    value = (figures or {}).get(name)
    return float(value) if isinstance(value, int | float) else None
