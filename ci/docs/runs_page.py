"""The table of the page of published runs, from the table of residuals that intervals rest on."""

from __future__ import annotations

import math

from fsdpbench.results.residuals.table import Condition, Residual, read_table

_HEAD = """
| source | chip | run | figure | published | simulated | error |
|---|---|---|---|--:|--:|--:|
"""


def runs_table() -> str:
    """Return the Markdown table: a row for each published figure with its prediction and error."""
    return _HEAD + "".join(_row(row) for row in read_table() if row.condition is Condition.KNOWN)


def _row(row: Residual) -> str:
    fitted = " (fitted)" if row.fitted else ""
    # The ratio is measured over predicted, of a time or of bytes: below 0 is predicted too slow or too large.
    error = math.expm1(-row.log_ratio)
    return (
        f"| {row.source}{fitted} | {row.chip} | {row.run} | {row.quantity}, {row.unit} "
        f"| {row.published:,g} | {row.predicted:,.4g} | {error:+.1%} |\n"
    )
