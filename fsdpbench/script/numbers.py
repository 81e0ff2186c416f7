"""Numbers that a script read from simulated tensors, and what it computes of them.

They are floats and integers like any other, and what is added, divided or rounded stays one of them. Where
they decide something (a comparison, `if`, `int`), and the decision is recorded.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from fsdpbench.sim.patches.torchscript import stand_in_for_builtin

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "pos", "abs")
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_DECIDING = ("isnan", "isinf", "isfinite", "isclose")
_COMPUTING = (
    "exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "pow", "fabs", "tanh", "floor", "ceil", "trunc",
    "copysign", "fmod", "hypot",
)  # fmt: skip


class Followed:
    """A number that came from a placeholder. `decided(operation, answer)` is called where one decides."""

    decided: Callable[[str, Any], None] = staticmethod(lambda operation, answer: None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        number = plain(self)
        return type(number), (number,)

    def __copy__(self) -> Followed:
        return self

    def __deepcopy__(self, memo: Any) -> Followed:
        return self

    def __bool__(self) -> bool:
        return _told("bool", bool(plain(self)))

    def __int__(self) -> int:
        return _told("int", int(plain(self)))

    def __float__(self) -> float:
        return _told("float", float(plain(self)))

    def __round__(self, digits: int | None = None) -> Any:
        return _followed(round(plain(self), digits))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        answer = getattr(ufunc, method)(*map(plain, inputs), **kwargs)
        name = ufunc.__name__
        if getattr(answer, "ndim", 1) != 0:
            return answer
        return _told(f"numpy.{name}", answer) if answer.dtype.kind == "b" else _followed(answer.item())


class PlaceholderFloat(Followed, float):  # type: ignore[misc]
    """A float of a simulated run."""

    __hash__ = float.__hash__
    __repr__ = float.__repr__


class PlaceholderInt(Followed, int):  # type: ignore[misc]
    """An integer of a simulated run."""

    __hash__ = int.__hash__
    __repr__ = int.__repr__


def plain(value: Any) -> Any:
    """The number without its history; anything else as it is."""
    if isinstance(value, float) and isinstance(value, Followed):
        return float.__float__(value)
    if isinstance(value, int) and isinstance(value, Followed):
        return int.__int__(value)
    return value


def _followed(answer: Any) -> Any:
    if type(answer) is float:
        return PlaceholderFloat(answer)
    return PlaceholderInt(answer) if type(answer) is int else answer


def _told(operation: str, answer: Any) -> Any:
    Followed.decided(operation, answer)
    return answer


def _arithmetic(name: str, *, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        first, second = plain(self), plain(other)
        return _followed(compute(second, first) if reflected else compute(first, second))

    return method


def _comparison(name: str, sign: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return _told(sign, compare(plain(self), plain(other)))

    return method


def _unary(name: str) -> Callable[[Any], Any]:
    compute = getattr(operator, name)
    return lambda self: _followed(compute(plain(self)))


def _rounded(name: str) -> Callable[[Any], Any]:
    compute = getattr(math, name)
    return lambda self: _followed(compute(plain(self)))


def _add_operators(kind: Any) -> None:
    for name in _ARITHMETIC:
        setattr(kind, f"__{name}__", _arithmetic(name, reflected=False))
        setattr(kind, f"__r{name}__", _arithmetic(name, reflected=True))
    for name in _UNARY:
        setattr(kind, f"__{name}__", _unary(name))
    for name in ("floor", "ceil", "trunc"):
        setattr(kind, f"__{name}__", _rounded(name))
    for name, sign in _COMPARISONS.items():
        setattr(kind, f"__{name}__", _comparison(name, sign))


def _leaving(kind: type[float], name: str) -> Callable[[Any], Any]:
    """A method whose answer cannot be followed (`statistics`, `Fraction` ask it)."""
    ask = getattr(kind, name)
    return lambda self: _told(name, ask(self))


PlaceholderFloat.is_integer = _leaving(float, "is_integer")  # type: ignore[method-assign,assignment]
PlaceholderFloat.as_integer_ratio = _leaving(float, "as_integer_ratio")  # type: ignore[method-assign,assignment]
for _kind in (PlaceholderFloat, PlaceholderInt):
    _add_operators(_kind)


def follow_math() -> None:
    """Let `math`'s functions follow these numbers, and report `isnan` and similar functions."""
    for name in (*_DECIDING, *_COMPUTING):
        original = getattr(math, name)
        following = _following(original, f"math.{name}" if name in _DECIDING else None)
        setattr(math, name, following)
        stand_in_for_builtin(original, following)


def _following(function: Callable[..., Any], decision: str | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Followed) for value in args):
            return function(*args, **kwargs)
        answer = function(*map(plain, args), **kwargs)
        return _followed(answer) if decision is None else _told(decision, answer)

    return call
