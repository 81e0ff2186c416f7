"""The table of the page of published runs, from the table of residuals that intervals rest on."""

from __future__ import annotations

import math

from fsdpbench.engine.results.residuals.widths import AS_IT_WAS, Residual, read_table


def runs_table() -> str:
    """Return the Markdown table: a row for each published figure with its prediction and error."""
    head = (
        "\n| source | chip | run | figure | published | simulated | error |\n|---|---|---|---|--:|--:|--:|\n"
    )
    return head + "".join(_row(row) for row in read_table() if row.condition in AS_IT_WAS)


def _row(row: Residual) -> str:
    fitted = " (fitted)" if row.fitted else ""
    # A residual is the logarithm of measured over predicted: above 0 means predicted too fast, or too small.
    error = math.expm1(-row.log_ratio)
    return (
        f"| {row.source}{fitted} | {row.chip} | {row.run} | {row.quantity}, {row.unit} "
        f"| {row.published:,g} | {row.predicted:,.4g} | {error:+.1%} |\n"
    )
