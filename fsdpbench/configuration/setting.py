"""What one setting is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdpbench.configuration.setting_values import Value
from fsdpbench.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """One setting: its name, default, how a text becomes its value, and what people should know of it."""

    name: str
    default: Value
    values: str
    meaning: str
    reason: str
    parse: Callable[[str], Value]

    def read(self, text: object) -> Value:
        """The value for `text` as typed (or already typed, from TOML or JSON). Raises `UsageError`."""
        plain = plain_text(text)
        try:
            return self.parse(plain)
        except ValueError as error:
            detail = f" ({error})" if str(error) else ""
            raise UsageError(
                f"{self.name}: {plain!r} is not a value of it{detail}; it takes {self.values}."
            ) from None


def plain_text(value: object) -> str:
    """A typed value as people type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip(" \t")
