"""A row of the table of settings, and the trade-offs of its values."""

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
"""Converts `Settings` to the source of one argument of the wrapping call; None: omit the argument."""


class Effect(IntEnum):
    """The direction in which a figure changes."""

    LESS = -1
    SAME = 0
    MORE = 1


@dataclass(frozen=True)
class Trade:
    """A change of a setting to `value` from another value, and its trade-offs.

    of: the values to change from (`*` matches any text), or but: all values except these; both are empty if
    it depends on other settings too. also: settings that change with it. risk: its effect on the training;
    empty: none. fsdp2, fsdp1: how a script writes it with `fully_shard` and `FullyShardedDataParallel`; the
    same for both if only one is given. variation: its name as a variation of a script (`script/variations`);
    needs: what it changes in a script. against: causes of lost time that it reduces
    (`reports/analysis/verdict.py`); `shown`: the suggestion of a verdict, if no single value suits everyone.
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
        """Return whether the trade applies to a setting that is now `value`."""
        if self.but:
            return value is not None and value not in self.but
        return any(
            type(value) is type(other)
            and (value == other or (isinstance(other, str) and fnmatchcase(str(value), other)))
            for other in self.of
        )

    @property
    def written(self) -> str:
        """Return the value as users type it, or the direction that a verdict suggests."""
        return self.shown or plain_text(self.value)

    @property
    def words(self) -> str:
        """Return the meaning and the risk."""
        return f"{self.meaning}; {self.risk}" if self.risk else self.meaning

    @property
    def script(self) -> str | None:
        """Return the line to write in a script that uses torch's FSDPs; None if they lack the setting."""
        both = self.fsdp2 and self.fsdp1
        return f"{self.fsdp2} (FSDP1: {self.fsdp1})" if both else self.fsdp2 or self.fsdp1 or None


@dataclass(frozen=True)
class Setting:
    """One setting: name, default, parser and explanation.

    example: values to show in help. in_script: set by the training script, not by the call that wraps.
    never_null: a system without this setting records its default instead of null.
    sweep: values by preset; `NAME/DEVICE` takes precedence over `NAME`. code: writes the argument, by system.
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
        """Return the setting's command-line option."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def words(self) -> list[str]:
        """Return the words that shell completion proposes."""
        parts = [part.strip() for part in re.split(r",| or ", self.values)]
        return [part for part in parts if _WORD.fullmatch(part) and not part.endswith("-K")]

    @property
    def usual(self) -> str:
        """Return the default as users type it."""
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
        """Return the value of `text` (typed text, or a value from TOML or JSON). Raises `UsageError`."""
        plain = plain_text(text)
        try:
            return self.parse(plain)
        except ValueError as error:
            detail = f" ({error})" if str(error) else ""
            raise UsageError(f"{plain!r} is not valid for {self.name}{detail}. Use {self.values}.") from None


def plain_text(value: object) -> str:
    """Return a value as users type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip(" \t")


def row(default: Value, parse: Callable[[str], Value], code: Mapping[str, Write] | None = None) -> Any:
    """Declare a field of `Settings`: the parts of its `Setting` that are not in `settings.toml`."""
    setting = Setting(default, parse, code=code or {})
    return dataclasses.field(default=default, metadata={"row": setting})


def described(settings: Mapping[str, Setting], tables: JsonObject) -> dict[str, Setting]:
    """Return `settings` by name, completed from `tables` (`settings.toml`). Raises `KeyError` for a setting
    without a table, `TypeError` for an unknown key."""

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
