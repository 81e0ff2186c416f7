"""Would steps that lose more with the number of GPUs bring published runs nearer?

    python ci/measure_scale.py

The slowest of n GPUs is z(n) standard deviations behind (fsdpbench/sim/model/profile.py). A spread of
`s` more than the profiles have makes a step longer by s (z(n) - z(8)), if nothing hides it. Each group
of known runs (source, family) is tried with the spread at which the other groups' error is least. Reads
fsdpbench/engine/results/residuals/residuals.csv alone; simulates nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean

from fsdpbench.engine.results.residuals.widths import Condition, Quantity, Residual, read_table
from fsdpbench.sim.model.profile import expected_largest

SPREADS = [step / 1000 for step in range(0, 61, 2)]
_FITTED = "llm-foundry"
"""Levels were fitted to its runs, of 8 to 256 GPUs."""


def main() -> None:
    groups: dict[str, list[Residual]] = defaultdict(list)
    for row in read_table():
        if row.condition is Condition.KNOWN and row.quantity is Quantity.TIME and not row.retries:
            groups[f"{row.source}, {row.family}"].append(row)
    tried = {name: rows for name, rows in groups.items() if _FITTED not in name}
    print(f"{'group held out':<36}{'runs':>5}{'spread':>8}{'mean error':>18}{'worst':>18}")
    for name, rows in tried.items():
        others = [group for other, group in tried.items() if other != name]
        best = min(SPREADS, key=lambda spread: fmean(_mean(group, spread) for group in others))
        print(f"{name:<36}{len(rows):>5}{best:>8.1%}{_change(rows, best)}")
    print("\nof one family and source on more or fewer GPUs, the spread that each needs alone:")
    for name, rows in groups.items():
        if _slopes(rows, 0):
            alone = min(SPREADS, key=lambda spread: abs(fmean(_slopes(rows, spread))))
            now = fmean(_slopes(rows, 0))
            print(f"{name:<36}{alone:>8.1%}   errors change by {now:+.1%} from fewest to most GPUs")


def _error(row: Residual, spread: float) -> float:
    """Return the error of the step time, above 0 if predicted too slow."""
    more = spread * max(0.0, expected_largest(row.gpus) - expected_largest(8))
    return math.exp(-row.log_ratio) * (1 + more) - 1


def _mean(rows: list[Residual], spread: float) -> float:
    return fmean(abs(_error(row, spread)) for row in rows)


def _change(rows: list[Residual], spread: float) -> str:
    means = f"{_mean(rows, 0):.1%} -> {_mean(rows, spread):.1%}"
    worst = [max(abs(_error(row, each)) for row in rows) for each in (0, spread)]
    return f"{means:>18}{f'{worst[0]:.1%} -> {worst[1]:.1%}':>18}"


def _slopes(rows: list[Residual], spread: float) -> list[float]:
    """How errors change from the fewest to the most GPUs, of each model that ran on several numbers."""
    models: dict[str, list[Residual]] = defaultdict(list)
    for row in rows:
        if row.gpus >= 8:
            models[f"{row.chip} {row.model} {row.compiled}"].append(row)
    found = []
    for same in models.values():
        ends = [[_error(row, spread) for row in same if row.gpus == gpus] for gpus in _ends(same)]
        if len(ends) == 2:
            found.append(fmean(ends[1]) - fmean(ends[0]))
    return found


def _ends(rows: list[Residual]) -> list[int]:
    numbers = {row.gpus for row in rows}
    return sorted({min(numbers), max(numbers)})


if __name__ == "__main__":
    main()
