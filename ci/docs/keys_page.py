"""Writes the table of docs/reference/profile-keys.md: `python ci/docs/keys_page.py`."""

from __future__ import annotations

from pathlib import Path

from fsdpbench.sim.model.keys import KEYS, Key

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "profile-keys.md"
HEAD = "| key | unit | possible | in packaged profiles | meaning |\n|---|---|---|---|---|\n"


def page(text: str) -> str:
    """The page with its table as the code has it."""
    return text.partition(HEAD)[0] + HEAD + "".join(map(_row, KEYS.values()))


def _row(key: Key) -> str:
    usual = f"{key.low:,g}" if key.low == key.high else f"{key.low:,g} to {key.high:,g}"
    return f"| `{key.name}` | {key.unit} | {key.least:,g} to {key.most:,g} | {usual} | {key.meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
