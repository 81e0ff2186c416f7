"""The sections of the page of settings, from the table that the command line itself reads."""

from __future__ import annotations

from fsdpbench.base.settings import SETTINGS, Effect, Trade


def settings_sections() -> str:
    """Markdown: a section for each setting with its values, default and the reason for it."""
    sections = [
        f"## `{setting.name}`\n\n{setting.meaning}\n\n"
        f"| flag | `{setting.flag}` |\n|---|---|\n"
        f"| values | {setting.values} |\n"
        f"| default | `{setting.usual}` |\n"
        f"| why | {setting.reason} |\n" + "".join(map(_trade, setting.trades))
        for setting in SETTINGS.values()
    ]
    return "\n" + "\n".join(sections)


def _trade(trade: Trade) -> str:
    """A row for what a value trades against its neighbours."""
    words = {Effect.LESS: "less", Effect.SAME: "the same", Effect.MORE: "more"}
    effects = f"{words[trade.memory]} memory, {words[trade.time]} time"
    return f"| `{trade.written}` | {effects}: {trade.words} |\n"
