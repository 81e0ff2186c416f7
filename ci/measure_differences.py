"""Fits how far the difference of two predicted steps may be off: `UNSHARED` of reports/pages/ranking.py, and
`APART`, where no more is known of it, of fsdpbench/engine/results/residuals/widths.py.

    python ci/measure_differences.py

Pairs are published runs of one source, chip, model, software and number of GPUs, without retries of the
allocator. A pair's error is the difference of both residuals. Its half width follows from the widths that
both runs would have if their source had not been used, and from how far the predicted steps differ. (Which
parts of them work and which wait was not recorded; with them a width is equal or larger.) The constant is the
least with which 90 % of the pairs are inside, sources counting alike, times Student's t over the normal
quantile for how few sources there are. Reads fsdpbench/engine/results/residuals/residuals.csv alone;
simulates nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fsdpbench.engine.results.residuals.widths import (
    AS_IT_WAS,
    LEVEL,
    Condition,
    Quantity,
    Residual,
    Unknown,
    Width,
    read_table,
    widening,
    width_of,
)
from fsdpbench.reports.pages.ranking import error_of_pair


def width_of_run(row: Residual) -> Width:
    """Return the width that the step time of a published run would have if its source had not been used."""
    aspects = {
        Unknown.CHIP: row.condition is Condition.NEW_CHIP,
        Unknown.NETWORK: row.network == "not stated" and row.nodes > 1,
        Unknown.MEMORY: row.retries > 0,
    }
    unknown = [aspect for aspect, is_so in aspects.items() if is_so]
    width = width_of(Quantity.TIME, unknown, row.compiled, without=row.source)
    return width.with_network(row.network_share, row.gpus)


def difference_quantile(rows: Sequence[Residual], level: float = LEVEL) -> float:
    """Return the `level` quantile of differences between residuals of one model's runs, every model of a
    source and chip weighted equally; 0 if no model has two runs."""
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.condition is Condition.KNOWN and row.quantity is Quantity.TIME and not row.retries:
            groups[(row.source, row.chip, row.model, row.software)].append(row.log_ratio)
    gaps = [
        (abs(a - b), len(found) * (len(found) - 1) / 2)
        for found in groups.values()
        for a, b in itertools.combinations(found, 2)
    ]
    total = sum(1 / pairs for _, pairs in gaps)
    reached = 0.0
    for gap, pairs in sorted(gaps):
        reached += 1 / pairs
        if reached >= level * total - 1e-9:
            return gap
    return 0.0


class Pair(NamedTuple):
    """Two runs of a source: what its width is without the constant, and how far off the difference is."""

    source: str
    width: float
    gap: float


def pairs_of(rows: Sequence[Residual]) -> list[Pair]:
    """Return the pairs among published runs, predicted as they were."""
    groups: dict[tuple[object, ...], list[Residual]] = defaultdict(list)
    for row in rows:
        if row.condition in AS_IT_WAS and row.quantity is Quantity.TIME and not row.retries:
            groups[row.source, row.chip, row.model, row.software, row.gpus, row.unit].append(row)
    return [_pair(*pair) for found in groups.values() for pair in itertools.combinations(found, 2)]


def _pair(one: Residual, other: Residual) -> Pair:
    halves = width_of_run(one).half, width_of_run(other).half
    moved = math.expm1(abs(math.log(one.predicted / other.predicted)))
    width = error_of_pair(halves, moved, least=0.0)
    return Pair(one.source, width, abs(one.log_ratio - other.log_ratio))


def fit(pairs: Sequence[Pair]) -> float:
    """Return the constant that holds for `LEVEL` of the pairs of a new source."""
    sizes: dict[str, int] = defaultdict(int)
    for pair in pairs:
        sizes[pair.source] += 1
    reached = 0.0
    for pair in sorted(pairs, key=lambda each: each.gap - each.width):
        reached += 1 / sizes[pair.source]
        if reached >= LEVEL * len(sizes) - 1e-9:
            return max(0.0, pair.gap - pair.width) * widening(len(sizes))
    return 0.0


def held_out(pairs: Sequence[Pair]) -> Iterator[tuple[str, float, list[bool], float]]:
    """Yield each source, the constant without it, which of its pairs are inside, their median half width."""
    for source in sorted({pair.source for pair in pairs}):
        own = [pair for pair in pairs if pair.source == source]
        least = fit([pair for pair in pairs if pair.source != source])
        inside = [pair.gap <= least + pair.width for pair in own]
        yield source, least, inside, statistics.median(least + pair.width for pair in own)


def main() -> None:
    pairs = pairs_of(read_table())
    print(f"{'source held out':<32}{'pairs':>6}{'constant':>10}{'inside':>8}{'median half width':>19}")
    found = list(held_out(pairs))
    for source, least, inside, half in found:
        print(f"{source:<32}{len(inside):>6}{least:>10.2%}{sum(inside):>8}{half:>19.1%}")
    whole = [each for _, _, inside, _ in found for each in inside]
    by_source = statistics.fmean(statistics.fmean(inside) for _, _, inside, _ in found)
    least = fit(pairs)
    print(f"held out: {sum(whole)} of {len(whole)} inside ({statistics.fmean(whole):.1%}), ", end="")
    print(f"{by_source:.1%} where sources count alike")
    half = statistics.median(least + pair.width for pair in pairs)
    print(f"fitted to all: {least:.2%}; median half width {half:.1%}")
    print(f"where no more is known: {difference_quantile(read_table()):.4f}")
    for constant in (0.001, least):
        inside = [pair.gap <= constant + pair.width for pair in pairs]
        print(f"with {constant:.2%} all of them: {statistics.fmean(inside):.1%} inside")


if __name__ == "__main__":
    main()
