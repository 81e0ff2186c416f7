"""The relations between the figures of a result, as a table for the page of the gate."""

from __future__ import annotations

from fsdpbench.reports.consistency import WORDS, rules


def rules_table() -> str:
    """Return the Markdown tables: relations, tolerances, and figures that nothing else binds."""
    relations = [
        f"| `{row['left']}` | {row['relation']} | `{row['right']}` | {row['tolerance']} | {_where(row)} |"
        for row in rules()
        if row["relation"] in WORDS
    ]
    within = [_tolerance(row) for row in rules() if row["relation"] == "within"]
    alone = [f"| `{row['left']}` | {row['right']} |" for row in rules() if row["relation"] == "alone"]
    parts = [
        "\n## The relations\n\n`~` is the sum over all keys in its place, `@` one of the keys listed.\n",
        "| | | | within | where |\n|---|---|---|---|---|",
        *relations,
        "\n| within | relative | absolute | because |\n|---|---|---|---|",
        *within,
        "\n| bound by no other figure | because |\n|---|---|",
        *alone,
    ]
    return "\n".join(parts) + "\n"


def _tolerance(row: dict[str, str]) -> str:
    relative, absolute = row["right"].split()
    return f"| {row['left']} | {relative} | {absolute} | {row['because']} |"


def _where(row: dict[str, str]) -> str:
    where = [row["device"]] if row["device"] else []
    where += [f"unless {row['unless'].replace(' ', ', ')}"] if row["unless"] else []
    where += [f"@: {row['each'].replace(' ', ', ')}"] if row["each"] else []
    return "; ".join(where)
