"""Shapes of models: dataclasses made from a user's plain or textual values, and their errors."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_type_hints

from fsdpbench.base.errors import UsageError
from fsdpbench.base.files.documents import texts_beside
from fsdpbench.base.numbers import finite_number, whole_number

S = TypeVar("S")

error_text = texts_beside(__file__, "errors.toml")
"""Returns a text of `errors.toml` by name, with values filled in."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element by name of dtype."""
CHANNELS = 3
"""Channels of an image: red, green and blue."""
_MOST_LAYERS = 10_000
"""Maximum number of layers: each consists of several modules, and more would take hours to build."""
_NUMBERS: Mapping[type, tuple[Callable[[str], float], str]] = {
    int: (whole_number, "a whole number below 2^63"),
    float: (finite_number, "a finite number"),
}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class WorkloadError(UsageError, ValueError):
    """A request that a workload cannot satisfy; the message names alternatives."""


class UnknownModelError(WorkloadError):
    """An unknown model name; `nearest` holds similar names."""

    def __init__(self, name: str, nearest: Sequence[str], known: Sequence[str]) -> None:
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known models: {', '.join(known)}"
        super().__init__(f"unknown model '{name}': {hint}")
        self.name = name
        self.nearest = tuple(nearest)


class ShapeError(WorkloadError):
    """An unknown, missing or invalid field of a shape."""


class NotBuiltError(ShapeError):
    """A model in a configuration file that our families do not support because of `key`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class DataError(WorkloadError):
    """A file or folder that cannot be used as input data."""


_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_ROPE_LISTS = ("short", "long")


@dataclass(frozen=True)
class Rope:
    """A scaling of rotary positions: `kind` and its numbers. Text: `yarn:factor=32;original=4096;truncate=0`.

    `factor` extends the context, `original` is its length before; `low`, `high`: llama3's frequency factors;
    `fast`, `slow`: yarn's betas; `truncate`: round yarn's bounds to whole pairs; `mscale`: factor on cosines
    and sines (0: yarn's 0.1 ln factor + 1); `short`, `long`: longrope's factors, as `short=1.0|1.1|...`,
    where `long` is for sequences longer than `original`.
    """

    kind: str = "default"
    factor: float = 1.0
    original: float = 8192.0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: float = 1.0
    mscale: float = 0.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Rope":
        """Parse the text form.

        Raises:
            ShapeError: the kind is unknown or a number is invalid.
        """
        kind, _, rest = text.partition(":")
        known = {field.name for field in fields(cls)} - {"kind"}
        numbers: dict[str, float] = {}
        lists: dict[str, tuple[float, ...]] = {}
        try:
            for part in filter(None, rest.split(";")):
                name, _, value = part.partition("=")
                if name not in known:
                    raise ValueError
                found = tuple(map(float, value.split("|")))
                if not all(math.isfinite(each) and each >= 0 for each in found):
                    raise ValueError
                if name in _ROPE_LISTS:
                    lists[name] = found
                else:
                    (numbers[name],) = found
            rope = cls(kind, short=lists.get("short", ()), long=lists.get("long", ()), **numbers)
            if kind not in _ROPE_KINDS or rope.factor < 1 or rope.high <= rope.low or rope.original < 1:
                raise ValueError
        except ValueError:
            raise ShapeError(error_text("shape.rope", text[:80], ", ".join(_ROPE_KINDS))) from None
        return rope

    def __str__(self) -> str:
        """Return the text form that `parse` reads."""
        plain = Rope(self.kind)
        numbers = [
            f"{name}={'|'.join(map(repr, value if isinstance(value, tuple) else [value]))}"
            for name, value in vars(self).items()
            if name != "kind" and value != getattr(plain, name)
        ]
        return self.kind + (":" + ";".join(numbers) if numbers else "")

    @property
    def attention_factor(self) -> float:
        """Return the factor on cosines and sines."""
        if self.mscale:
            return self.mscale
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0


def make_shape(shape_type: type[S], values: Mapping[str, Any]) -> S:
    """Make an instance of the dataclass `shape_type`; values may be text (`"32"`, `"true"`).

    The dataclass checks values in its `__post_init__`.

    Raises:
        ShapeError: a field is unknown, missing or of the wrong type.
    """
    known = {field.name: field for field in fields(shape_type)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ShapeError(f"unknown shape field '{name}': {hint}The fields are {', '.join(known)}")
    missing = [
        name
        for name, field in known.items()
        if name not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ShapeError(f"the shape lacks {', '.join(missing)}: give them as --shape {missing[0]}=...")
    types = get_type_hints(shape_type)  # annotations of a user's own shape may be text
    return shape_type(**{name: _value(name, types[name], value) for name, value in values.items()})


def _value(name: str, kind: type, value: Any) -> Any:
    """Convert `value` to the field's type."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        raise ShapeError(f"shape field {name} is {value!r}: it must be true or false")
    if kind not in _NUMBERS:
        return str(value)
    read, words = _NUMBERS[kind]
    try:
        if kind is int and isinstance(value, bool | float):
            raise ValueError
        return read(str(value))
    except ValueError:
        raise ShapeError(f"shape field {name} is {value!r}: it must be {words}") from None


def check_share(shape: Any, *names: str) -> None:
    """Raise `ShapeError` unless each of these fields is at least 0 and below 1."""
    for name in names:
        if not 0 <= getattr(shape, name) < 1:
            raise ShapeError(f"shape field {name} is {getattr(shape, name)}: it must be from 0 to below 1")


def check_word(shape: Any, name: str, words: Iterable[str]) -> None:
    """Raise `ShapeError` unless the field `name` is one of `words`."""
    word = getattr(shape, name)
    if word not in (known := list(words)):
        raise ShapeError(f"shape field {name} is '{word}': it must be one of {', '.join(known)}")


def check_least(shape: Any, *names: str, least: int = 1) -> None:
    """Raise `ShapeError` if one of these fields is below `least`."""
    for name in names:
        if getattr(shape, name) < least:
            raise ShapeError(f"shape field {name} is {getattr(shape, name)}: it must be at least {least}")
        if name == "layers":
            check_layers(shape.layers, name)


def check_layers(number: int, name: str) -> None:
    """Raise `ShapeError` if there are more layers than can be built in a reasonable time."""
    if number > _MOST_LAYERS:
        raise ShapeError(f"shape field {name} makes {number} layers: at most {_MOST_LAYERS:,} are built")


def check_divides(shape: Any, part: str, whole: str) -> None:
    """Raise `ShapeError` unless the field `part` divides the field `whole` evenly."""
    divisor, number = getattr(shape, part), getattr(shape, whole)
    if number % divisor:
        raise ShapeError(f"shape field {part} is {divisor}: it must divide {whole}, {number}, evenly")
