"""A family's shape as a frozen dataclass, made from the plain or textual values that a user gives."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from fsdpbench.numbers import finite_number, whole_number
from fsdpbench.workloads.tensor_plan import ShapeError

S = TypeVar("S")

_MOST_LAYERS = 10_000
"""Each is modules and parameters of its own: far more than anybody trains would only take hours to build."""
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def make_shape(shape_type: type[S], values: Mapping[str, Any]) -> S:
    """An instance of the dataclass `shape_type`; values may be text (`"32"`, `"true"`).

    The dataclass checks the values themselves in `__post_init__`.

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
    return shape_type(**{name: _value(name, known[name].type, value) for name, value in values.items()})


def _value(name: str, type_name: Any, value: Any) -> Any:
    """`value` as the field's type; dataclass types are names here, as annotations are not evaluated."""
    if type_name == "bool":
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        raise ShapeError(f"shape field {name} is {value!r}: it must be true or false")
    if type_name == "int":
        try:
            if isinstance(value, bool | float):
                raise ValueError
            return whole_number(str(value))
        except ValueError:
            raise ShapeError(
                f"shape field {name} is {value!r}: it must be a whole number below 2^63"
            ) from None
    if type_name == "float":
        try:
            return finite_number(str(value))
        except ValueError:
            raise ShapeError(f"shape field {name} is {value!r}: it must be a finite number") from None
    return str(value)


def check_share(shape: Any, *names: str) -> None:
    """Raises: ShapeError, one of the fields is not from 0 up to below 1."""
    for name in names:
        if not 0 <= getattr(shape, name) < 1:
            raise ShapeError(f"shape field {name} is {getattr(shape, name)}: it must be from 0 to below 1")


def check_word(shape: Any, name: str, words: Iterable[str]) -> None:
    """Raises: ShapeError, the field `name` is none of `words`."""
    word = getattr(shape, name)
    if word not in (known := list(words)):
        raise ShapeError(f"shape field {name} is '{word}': it must be one of {', '.join(known)}")


def check_positive(shape: Any, *names: str) -> None:
    """Raises: ShapeError, one of the fields is below 1."""
    for name in names:
        if getattr(shape, name) < 1:
            raise ShapeError(f"shape field {name} is {getattr(shape, name)}: it must be at least 1")
        if name == "layers":
            check_layers(shape.layers, name)


def check_layers(number: int, name: str) -> None:
    """Raises: ShapeError, there are more of them than anybody would wait for."""
    if number > _MOST_LAYERS:
        raise ShapeError(f"shape field {name} makes {number} layers: at most {_MOST_LAYERS:,} are built")


def check_divides(shape: Any, part: str, whole: str) -> None:
    """Raises: ShapeError, the field `part` does not divide the field `whole` evenly."""
    divisor, number = getattr(shape, part), getattr(shape, whole)
    if number % divisor:
        raise ShapeError(f"shape field {part} is {divisor}: it must divide {whole}, {number}, evenly")
