"""Effects of one setting, with all others equal.

For a setting and two of its values, each pair of finished configurations that differ only in that setting
gives one ratio of throughputs. The effect is their geometric mean. Its 95 % interval (Student's t over the
logarithms) shows how far the effect depends on the other settings or, for measured runs, also on noise::

    wrap=block  prefetch=pre   limit=2   100  \\  ratio 0.91  \\
    wrap=block  prefetch=none  limit=2    91  /               |  mean 0.90, from 0.88 to 0.92
    wrap=root   prefetch=pre   limit=2    60  \\  ratio 0.89  /
    wrap=root   prefetch=none  limit=2    53  /

Allocator retries cost so much, and so unevenly, that they would hide everything else: if some pairs have no
retries on either side, only these pairs make the effect, and the others are reported separately.

The reference is the value of the best configuration, so an effect reads as "the cost of leaving the best
value". If two systems are compared, a setting that one of them lacks keeps its best value in the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpbench.reports.pages.display import setting
from fsdpbench.reports.pages.ranking import Ranked, values_of, varying_settings
from fsdpbench.reports.pages.view import Configuration, Status

# Smaller effects are reported as none: they are not worth a change of settings.
WORTH_SAYING = 0.01


@dataclass(frozen=True, slots=True)
class Effect:
    """Throughput with `value` relative to `reference` (0.9: a tenth slower), others equal.

    `low` and `high` bound the mean with 95 % (None below three pairs), `smallest` and `largest` are the
    extremes of the single pairs. `memory` is the ratio of reserved memory over the same pairs.
    `with_retries`: every pair has allocator retries on one side or both. `other_pairs` and `other_ratio`:
    the pairs left out because of their retries.
    `out_of_memory`: the number of pairs in which only the configuration with `value`, not the one with
    `reference`, ran out of memory.
    """

    name: str
    value: str
    reference: str
    pairs: int
    ratio: float | None
    low: float | None
    high: float | None
    smallest: float | None
    largest: float | None
    memory: float | None
    out_of_memory: int
    with_retries: bool = False
    other_pairs: int = 0
    other_ratio: float | None = None

    @property
    def strength(self) -> float:
        """Return how much the setting matters, in either direction: |log ratio|."""
        return abs(math.log(self.ratio)) if self.ratio else 0.0


_Pair = tuple[float, float | None]
"""Ratios of throughput and of reserved memory."""


def effects(ranked: Sequence[Ranked], recommended: Ranked | None = None) -> list[Effect]:
    """Return every varying setting's effects: settings that matter most first, values in order of effect.
    `recommended`: the row whose values are the reference, if not the fastest."""
    if not ranked or not ranked[0].throughput:
        return []
    best = (recommended or ranked[0]).row
    rows = [entry.row for entry in ranked]
    throughput = {id(entry.row): entry.throughput for entry in ranked}
    found: list[list[Effect]] = []
    for name in varying_settings(rows):
        if name in best.settings:
            reference = setting(best.settings[name])
            others = [value for value in values_of(rows, name) if value != reference]
            found.append([_effect(rows, throughput, name, value, reference) for value in others])
    found = [[effect for effect in group if effect.pairs or effect.out_of_memory] for group in found]
    found.sort(key=lambda group: max((effect.strength for effect in group), default=0.0), reverse=True)
    return [
        effect for group in found for effect in sorted(group, key=lambda effect: effect.ratio or math.inf)
    ]


def _effect(
    rows: Sequence[Configuration], throughput: dict[int, float | None], name: str, value: str, reference: str
) -> Effect:
    calm: list[_Pair] = []
    retrying: list[_Pair] = []
    out_of_memory = 0
    for without, with_value in _pairs(rows, name, reference, value):
        before, after = throughput[id(without)], throughput[id(with_value)]
        if before and after:
            memory_before, memory_after = without.result.reserved, with_value.result.reserved
            memory = memory_after / memory_before if memory_before and memory_after else None
            retries = (row.result.alloc_retries_per_step for row in (without, with_value))
            group = retrying if any(retries) else calm
            group.append((after / before, memory))
        elif before and with_value.status is Status.OOM:
            out_of_memory += 1
    counted, others = (calm, retrying) if calm else (retrying, [])
    ratios = [ratio for ratio, _ in counted]
    mean, low, high = _geometric_mean(ratios)
    return Effect(
        name=name,
        value=value,
        reference=reference,
        pairs=len(ratios),
        ratio=mean,
        low=low,
        high=high,
        smallest=min(ratios, default=None),
        largest=max(ratios, default=None),
        memory=_geometric_mean([memory for _, memory in counted if memory is not None])[0],
        out_of_memory=out_of_memory,
        with_retries=bool(retrying) and not calm,
        other_pairs=len(others),
        other_ratio=_geometric_mean([ratio for ratio, _ in others])[0],
    )


def _pairs(
    rows: Sequence[Configuration], name: str, first: str, second: str
) -> list[tuple[Configuration, Configuration]]:
    """Return pairs of rows with `name=first` and rows with `name=second` that are equal otherwise."""
    # Systems have different settings, and each fills in its own default for settings not given.
    shared = _common_settings(rows, name, (first, second)) if name == "system" else None
    if shared is not None:
        rows = _at_best_elsewhere(rows, name, shared)
    ignored = {name, "batch"} if _sets_batch(rows, name) else {name}

    def rest(row: Configuration) -> tuple[tuple[str, Any], ...]:
        names = row.settings.keys() - ignored if shared is None else shared
        return tuple(sorted((key, setting(row.settings.get(key))) for key in names))

    by_rest: dict[tuple[tuple[str, Any], ...], list[Configuration]] = {}
    for row in rows:
        if name in row.settings and setting(row.settings[name]) == first:
            by_rest.setdefault(rest(row), []).append(row)
    return [
        (partner, row)
        for row in rows
        if name in row.settings and setting(row.settings[name]) == second
        for partner in by_rest.get(rest(row), [])
    ]


def _sets_batch(rows: Sequence[Configuration], name: str) -> bool:
    """Return whether each value of a setting that saves memory has its own batch size."""
    if name != "activation_checkpointing":
        return False
    found = {(setting(row.settings.get(name)), setting(row.settings.get("batch"))) for row in rows}
    return len(found) == len({value for value, _ in found}) and len({batch for _, batch in found}) > 1


def _common_settings(rows: Sequence[Configuration], name: str, values: tuple[str, str]) -> frozenset[str]:
    """Return the varying settings that every row with one of the two values has."""
    concerned = (row.settings for row in rows if setting(row.settings.get(name)) in values)
    return frozenset(varying_settings(rows)).intersection(*concerned) - {name}


def _at_best_elsewhere(
    rows: Sequence[Configuration], name: str, shared: frozenset[str]
) -> list[Configuration]:
    """Return the rows whose settings outside `shared` equal those of the best row that has them."""
    kept = list(rows)
    for other in set(varying_settings(rows)) - shared - {name}:
        best = next((setting(row.settings[other]) for row in rows if other in row.settings), None)
        kept = [row for row in kept if other not in row.settings or setting(row.settings[other]) == best]
    return kept


def _geometric_mean(ratios: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the geometric mean, and its 95 % interval from three ratios on; None: it overflows a float."""
    if not ratios:
        return None, None, None
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    mean = float(logs.mean())
    if len(ratios) < 3:
        return _exp(mean), None, None
    from scipy import special  # takes long to import

    half = float(special.stdtrit(len(ratios) - 1, 0.975) * logs.std(ddof=1) / math.sqrt(len(ratios)))
    return _exp(mean), _exp(mean - half), _exp(mean + half)


def _exp(value: float) -> float | None:
    try:
        return math.exp(value)
    except OverflowError:  # impossible figures in a damaged result
        return None
