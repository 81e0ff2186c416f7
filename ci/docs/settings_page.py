"""The page of settings, from the table that the command line itself reads."""

from __future__ import annotations

from fsdpbench.configuration.settings import SETTINGS, show_value

_HEAD = """# Settings

Each setting has one name everywhere: the flag (`--backward-prefetch`), the key in TOML, `--set key=value`,
JSON and `results.sqlite`. `fsdpbench sweep`, `plan` and `tune` take a comma-separated list for each.
`fsdpbench list settings` prints this table. A system that does not have a setting says so
([systems](../systems.md)).

"""


def settings_page() -> str:
    """Markdown: a section for each setting with its values, default and the reason for it."""
    rows = [
        f"## `{setting.name}`\n\n{setting.meaning}\n\n"
        f"| flag | `--{setting.name.replace('_', '-')}` |\n|---|---|\n"
        f"| values | {setting.values} |\n"
        f"| default | `{show_value(setting.read(setting.default))}` |\n"
        f"| why | {setting.reason} |\n"
        for setting in SETTINGS.values()
    ]
    return _HEAD + "\n".join(rows)
