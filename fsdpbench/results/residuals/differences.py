"""By how much two predictions of one sweep must differ to be distinguished.

Configurations of one model on one machine share most of what is wrong with their predictions. What is left is
how far residuals of runs of one model, from one source and on one chip, differ from one another.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence

from fsdpbench.results.residuals.table import Condition, Quantity, Residual, read_table
from fsdpbench.results.residuals.widths import LEVEL


@functools.cache
def apart() -> float:
    """|ln(ratio)| of two step times below which they cannot be distinguished."""
    return difference_quantile(read_table())


def difference_quantile(rows: Sequence[Residual], level: float = LEVEL) -> float:
    """The `level` quantile of differences between residuals of one model's runs, every model of a source and
    chip counting alike; 0 where no model has two runs."""
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
