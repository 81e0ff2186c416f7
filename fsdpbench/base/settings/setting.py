"""A row of the table of settings, and one of its trades."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings.values import Choice, Value

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
Write = Callable[[Any], str | None]
"""From `Settings` to an argument of the call that wraps, as source; None: the call leaves it out."""


class Effect(IntEnum):
    """How a figure changes."""

    LESS = -1
    SAME = 0
    MORE = 1


LESS, MORE = Effect.LESS, Effect.MORE


@dataclass(frozen=True)
class Trade:
    """A step to `value` from a neighbour, and what it trades.

    of: the values that it is a step from, or a test for them; empty where it depends on more than this
    setting. also: what changes with it. risk: what it does to the training itself; empty: nothing.
    fsdp2, fsdp1: how a script writes it with `fully_shard` and with `FullyShardedDataParallel`; alike where
    only one is given. variation: its name among the variations of a script (`script/variations`).
    against: causes of lost time that it helps against (`reports/analysis/words/verdict.py`); `shown`: what a
    verdict suggests, where no value is right for all.
    """

    value: Value
    meaning: str
    of: tuple[Value, ...] | Callable[[Any], bool] = ()
    memory: Effect = Effect.SAME
    time: Effect = Effect.SAME
    risk: str = ""
    also: tuple[tuple[str, Value], ...] = ()
    fsdp2: str = ""
    fsdp1: str = ""
    variation: str | None = None
    against: tuple[str, ...] = ()
    shown: str = ""

    def leaves(self, value: Value) -> bool:
        """Return whether it is a step from `value`."""
        if callable(self.of):
            return self.of(value)
        return any(value == other and type(value) is type(other) for other in self.of)

    @property
    def written(self) -> str:
        """Return its value as people type it, or a direction."""
        return self.shown or plain_text(self.value)

    @property
    def words(self) -> str:
        """Return what it does and what it risks."""
        return f"{self.meaning}; {self.risk}" if self.risk else self.meaning

    @property
    def script(self) -> str | None:
        """Return the line to write in a script that uses torch's FSDPs; None where torch has none."""
        both = self.fsdp2 and self.fsdp1
        return f"{self.fsdp2} (FSDP1: {self.fsdp1})" if both else self.fsdp2 or self.fsdp1 or None


@dataclass(frozen=True)
class Setting:
    """One setting: its name, default, how a text becomes its value, and what people should know of it.

    example: values to show in help. in_script: the training script does it, not the call
    that wraps. never_null: a system without it has its default, not null.
    sweep: its values by preset, `NAME/DEVICE` before `NAME`. code: by system, how its call writes it.
    """

    default: Value
    values: str
    meaning: str
    reason: str
    parse: Callable[[str], Value]
    name: str = ""
    example: tuple[str, ...] = ()
    default_words: str = ""
    in_script: bool = False
    never_null: bool = False
    sweep: Mapping[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    trades: tuple[Trade, ...] = ()
    code: Mapping[str, Write] = dataclasses.field(default_factory=dict)

    @property
    def flag(self) -> str:
        """Return its option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def words(self) -> list[str]:
        """Return the words that it takes, as the shell proposes them."""
        parts = [part.strip() for part in re.split(r",| or ", self.values)]
        return [part for part in parts if _WORD.fullmatch(part) and not part.endswith("-K")]

    @property
    def usual(self) -> str:
        """Return its default as people type it."""
        if self.default is None:
            return next(word for word in self.words if self.read(word) is None)
        return plain_text(self.default)

    def help(self, many: bool) -> str:
        """Return the help of its flag; `many`: it takes a list."""
        takes = f": {self.values}"
        if self.example:
            lists = f" or {','.join(self.example)}" if many and len(self.example) > 1 else ""
            takes = f", e.g. {self.example[0]}{lists}"
        return f"{self.meaning.rstrip('.')}{takes}. Default: {self.default_words or self.usual}."

    def read(self, text: object) -> Value:
        """Return the value for `text` as typed (or already typed, from TOML or JSON). Raises `UsageError`."""
        plain = plain_text(text)
        try:
            return self.parse(plain)
        except ValueError as error:
            detail = f" ({error})" if str(error) else ""
            raise UsageError(f"{plain!r} is not valid for {self.name}{detail}. Use {self.values}.") from None


def plain_text(value: object) -> str:
    """Return a typed value as people type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip(" \t")


def row(
    default: Value, parse: Callable[[str], Value], meaning: str, reason: str, takes: str = "", **rest: Any
) -> Any:
    """Declare a field of `Settings`: its default, and the rest of its `Setting`. `takes`: where it is more
    than the words of a choice."""
    takes = ", ".join(parse.words) if isinstance(parse, Choice) else takes
    setting = Setting(default, takes, meaning, reason, parse, **rest)
    return dataclasses.field(default=default, metadata={"row": setting})


def saves(value: Value, meaning: str, **rest: Any) -> Trade:
    """Declare a trade that takes less memory and more time."""
    return Trade(value, meaning, memory=LESS, time=MORE, **rest)


def speeds(value: Value, meaning: str, **rest: Any) -> Trade:
    """Declare a trade that takes more memory and less time."""
    return Trade(value, meaning, memory=MORE, time=LESS, **rest)


def wins(value: Value, meaning: str, **rest: Any) -> Trade:
    """Declare a trade that takes less memory and less time."""
    return Trade(value, meaning, memory=LESS, time=LESS, **rest)
