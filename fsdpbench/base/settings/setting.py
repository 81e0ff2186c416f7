"""A row of the table of settings, and one of its trades."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any

from fsdpbench.base.errors import UsageError
from fsdpbench.base.reading import JsonObject
from fsdpbench.base.settings.values import Choice, Value

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
Write = Callable[[Any], str | None]
"""From `Settings` to an argument of the call that wraps, as source; None: the call leaves it out."""


class Effect(IntEnum):
    """How a figure changes."""

    LESS = -1
    SAME = 0
    MORE = 1


@dataclass(frozen=True)
class Trade:
    """A step to `value` from a neighbour, and what it trades.

    of: the values that it is a step from (`*`: any rest of a text), or but: all but these; both empty where
    it depends on more than this setting. also: what changes with it. risk: what it does to the training;
    empty: nothing. fsdp2, fsdp1: how a script writes it with `fully_shard` and `FullyShardedDataParallel`;
    alike where only one is given. variation: its name among those of a script (`script/variations`);
    needs: what it changes in a script. against: causes of lost time that it helps against
    (`reports/analysis/verdict.py`); `shown`: what a verdict suggests, where no value is right for all.
    """

    value: Value
    meaning: str
    of: tuple[Value, ...] = ()
    but: tuple[Value, ...] = ()
    memory: Effect = Effect.SAME
    time: Effect = Effect.SAME
    risk: str = ""
    also: tuple[tuple[str, Value], ...] = ()
    fsdp2: str = ""
    fsdp1: str = ""
    variation: str | None = None
    needs: str = ""
    against: tuple[str, ...] = ()
    shown: str = ""

    def leaves(self, value: Value) -> bool:
        """Return whether it is a step from `value`."""
        if self.but:
            return value is not None and value not in self.but
        return any(
            type(value) is type(other)
            and (value == other or (isinstance(other, str) and fnmatchcase(str(value), other)))
            for other in self.of
        )

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
    parse: Callable[[str], Value]
    name: str = ""
    values: str = ""
    meaning: str = ""
    reason: str = ""
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
            one = self.example[0] if self.example[0] != self.usual else self.example[-1]
            lists = f" or {','.join(self.example)}" if many and len(self.example) > 1 else ""
            takes = f", e.g. {one}{lists}"
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


def row(default: Value, parse: Callable[[str], Value], code: Mapping[str, Write] | None = None) -> Any:
    """Declare a field of `Settings`: its default, and what `settings.toml` does not say of its `Setting`."""
    setting = Setting(default, parse, code=code or {})
    return dataclasses.field(default=default, metadata={"row": setting})


def described(settings: Mapping[str, Setting], tables: JsonObject) -> dict[str, Setting]:
    """Return `settings` by name, with what `tables` (`settings.toml`) say of each. Raises `KeyError` for a
    setting without a table, `TypeError` for an unknown key."""

    def read(name: str, value: Value) -> Value:
        return value if isinstance(value, str) and "*" in value else settings[name].parse(plain_text(value))

    def trade(name: str, value: Value = None, **rest: Any) -> Trade:
        for key in rest.keys() & {"of", "but"}:
            rest[key] = tuple(read(name, each) for each in rest[key])
        for key in rest.keys() & {"memory", "time"}:
            rest[key] = Effect[rest[key].upper()]
        also = tuple((other, read(other, each)) for other, each in rest.pop("also", {}).items())
        against = tuple(rest.pop("against", ()))
        value = None if value is None else read(name, value)
        return Trade(value, also=also, against=against, **rest)

    def whole(name: str, trades: Sequence[JsonObject] = (), takes: str = "", **rest: Any) -> Setting:
        parse = settings[name].parse
        values = ", ".join(parse.words) if isinstance(parse, Choice) else takes
        sweep = {
            preset: tuple(read(name, each) for each in listed)
            for preset, listed in rest.pop("sweep", {}).items()
        }
        rest |= {"example": tuple(rest.pop("example", ())), "trades": tuple(trade(name, **t) for t in trades)}
        return dataclasses.replace(settings[name], name=name, values=values, sweep=sweep, **rest)

    return {name: whole(name, **tables[name]) for name in settings}
