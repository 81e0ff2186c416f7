"""The sections of the page of settings, from the table that the command line itself reads."""

from __future__ import annotations

from fsdpbench.settings import SETTINGS, show_value


def settings_sections() -> str:
    """Markdown: a section for each setting with its values, default and the reason for it."""
    sections = [
        f"## `{setting.name}`\n\n{setting.meaning}\n\n"
        f"| flag | `--{setting.name.replace('_', '-')}` |\n|---|---|\n"
        f"| values | {setting.values} |\n"
        f"| default | `{show_value(setting.read(setting.default))}` |\n"
        f"| why | {setting.reason} |\n"
        for setting in SETTINGS.values()
    ]
    return "\n" + "\n".join(sections)
