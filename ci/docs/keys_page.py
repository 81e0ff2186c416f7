"""The table of the page of profile keys, from the table that the reader of profiles itself uses."""

from __future__ import annotations

from fsdpbench.sim.model.keys import KEYS, Key


def keys_table() -> str:
    """Return the Markdown table: a row for each key with its unit, possible range and meaning."""
    head = "\n| key | unit | possible | in packaged profiles | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(map(_row, KEYS.values()))


def _row(key: Key) -> str:
    usual = f"{key.low:,g}" if key.low == key.high else f"{key.low:,g} to {key.high:,g}"
    return f"| `{key.name}` | {key.unit} | {key.least:,g} to {key.most:,g} | {usual} | {key.meaning} |\n"
