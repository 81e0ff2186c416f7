"""Numbers that a script read from simulated tensors, and numbers computed from them.

They behave like other floats and integers; sums, quotients and roundings of them are followed too. If one
decides something (a comparison, `if`, `int`), the decision is recorded.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType
from typing import Any

from fsdpbench.sim.torch_device.patches.dynamo import stand_in_for_builtin

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
_DIVIDING = ("truediv", "floordiv", "mod", "divmod")
_UNARY = ("neg", "pos", "abs")
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_DECIDING = ("isnan", "isinf", "isfinite", "isclose")
_OF_SEQUENCES = ("fsum", "prod", "dist", "sumprod")


class Followed:
    """A number from a placeholder; it calls `decided(operation, answer)` when it decides something."""

    decided: Callable[[str, Any], None] = staticmethod(lambda operation, answer: None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        number = plain(self)
        return type(number), (number,)

    def __copy__(self) -> "Followed":
        return self

    def __deepcopy__(self, memo: Any) -> "Followed":
        return self

    def __repr__(self) -> str:
        return PlaceholderText(repr(plain(self)))

    def __format__(self, spec: str) -> str:
        return PlaceholderText(format(plain(self), spec))

    def __round__(self, digits: int | None = None) -> Any:
        return followed(round(plain(self), digits))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        answer = getattr(ufunc, method)(*map(plain, inputs), **kwargs)
        name = ufunc.__name__
        if getattr(answer, "ndim", 1) != 0:
            Followed.decided(f"numpy.{name}", 0)  # arrays are not followed
            return answer
        return _decided(f"numpy.{name}", answer) if answer.dtype.kind == "b" else followed(answer.item())


class PlaceholderFloat(Followed, float):  # type: ignore[misc]
    """A float that is followed."""


class PlaceholderInt(Followed, int):  # type: ignore[misc]
    """An integer that is followed."""


class PlaceholderText(str):
    """A followed number as text: `str(number)`, `f"{number:.2f}"`. Texts made from it are not followed."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (str.__str__(self),)


def plain(value: Any) -> Any:
    """Return a followed number as a plain one; anything else as it is."""
    if isinstance(value, float) and isinstance(value, Followed):
        return float.__float__(value)
    if isinstance(value, int) and isinstance(value, Followed):
        return int.__int__(value)
    return value


def all_plain(value: Any) -> Any:
    """Return `plain` of a value, or of each element of a list or tuple."""
    return type(value)(map(all_plain, value)) if type(value) in (list, tuple) else plain(value)


def followed(answer: Any) -> Any:
    """Return an answer with its numbers followed, also inside tuples and lists."""
    if type(answer) in (tuple, list):
        return type(answer)(map(followed, answer))
    if type(answer) is float:
        return PlaceholderFloat(answer)
    return PlaceholderInt(answer) if type(answer) is int else answer


def _decided(operation: str, answer: Any) -> Any:
    Followed.decided(operation, answer)
    return answer


def _arithmetic(name: str, *, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = divmod if name == "divmod" else getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        first, second = (other, self) if reflected else (self, other)
        if name in _DIVIDING and isinstance(second, Followed) and not plain(second):
            # An unknown divisor that reads as zero: the quotient is unknown, and reads as zero too.
            first, second = type(plain(first))(0), type(plain(second))(1)
        return followed(compute(plain(first), plain(second)))

    return method


def _comparison(name: str, sign: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return _decided(sign, compare(plain(self), plain(other)))

    return method


def _unary(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: followed(compute(plain(self)))


def _converting(kind: Any, plainly: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: _decided(kind.__name__, kind(plainly(self)))


def _add_operators(kind: Any) -> None:
    for name in _ARITHMETIC:
        setattr(kind, f"__{name}__", _arithmetic(name, reflected=False))
        setattr(kind, f"__r{name}__", _arithmetic(name, reflected=True))
    for name in _UNARY:
        setattr(kind, f"__{name}__", _unary(getattr(operator, name)))
    for name in ("floor", "ceil", "trunc"):
        setattr(kind, f"__{name}__", _unary(getattr(math, name)))
    for name, sign in _COMPARISONS.items():
        setattr(kind, f"__{name}__", _comparison(name, sign))


def _asked(kind: type, name: str, sign: str) -> Callable[..., Any]:
    """Return a method whose answer cannot be followed (`statistics`, `Fraction` call methods of float)."""
    ask = getattr(kind, name)
    return lambda self, *args: _decided(sign, ask(self, *args))


for _convert in (bool, int, float, complex, hash):
    setattr(Followed, f"__{_convert.__name__}__", _converting(_convert, plain))
for _convert in (int, float):
    setattr(PlaceholderText, f"__{_convert.__name__}__", _converting(_convert, str.__str__))
for _kind in (PlaceholderFloat, PlaceholderInt):
    _add_operators(_kind)
for _name in ("is_integer", "as_integer_ratio", "hex"):
    setattr(PlaceholderFloat, _name, _asked(float, _name, _name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"):
    setattr(PlaceholderText, _name, _asked(str, _name, _COMPARISONS.get(_name.strip("_"), "in")))
for _name in ("startswith", "endswith", "isdigit", "isnumeric", "find", "count"):
    setattr(PlaceholderText, _name, _asked(str, _name, _name))


def follow_math() -> None:
    """Make the functions of `math` follow these numbers, and record `isnan` and similar functions."""
    functions = {name: each for name, each in vars(math).items() if isinstance(each, BuiltinFunctionType)}
    for name, original in functions.items():
        following = _following(original, f"math.{name}" if name in _DECIDING else None)
        setattr(math, name, following)
        stand_in_for_builtin(original, following)


def _following(function: Callable[..., Any], decision: str | None) -> Callable[..., Any]:
    whole = function.__name__ in _OF_SEQUENCES

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = [list(each) if isinstance(each, Iterable) else each for each in args] if whole else args
        if not any(map(holds, values)):
            return function(*values, **kwargs)
        numbers = [list(map(plain, each)) if isinstance(each, list) else plain(each) for each in values]
        answer = function(*numbers, **kwargs)
        return followed(answer) if decision is None else _decided(decision, answer)

    return call


def holds(value: Any) -> bool:
    """Return whether a value is a followed number, or a list or tuple with one."""
    return isinstance(value, Followed) or (isinstance(value, (list, tuple)) and any(map(holds, value)))
