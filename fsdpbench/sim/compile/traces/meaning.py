"""What an object means in another process, for guards that tell it by its number there.

A function means its code, a class the code of all that it has, since Dynamo takes for granted that a class
stays as it is while a process runs.
"""

from __future__ import annotations

import hashlib
import marshal
import types
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)
_OF_MODULES = (types.ModuleType, type, type(None))
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.default))
_MARSHAL = 2
"""The last format that says the same of equal code: later ones have in it who refers to what."""


class NotKeptError(Exception):
    """This trace cannot be kept, or is not the one that was."""


def digest(content: bytes) -> str:
    """Short enough for a file's name."""
    return hashlib.sha256(content).hexdigest()[:32]


def of_code(code: types.CodeType) -> str:
    """The code, with that of the functions that it makes, its file and its line."""
    return digest(marshal.dumps(code, _MARSHAL))


class Meanings:
    """Of the objects of one trace. `codes`: all code that was met, inside of functions and classes too."""

    def __init__(self) -> None:
        self.codes: set[str] = set()
        self._of_classes: dict[type, str] = {}
        self._of_functions: dict[int, tuple[types.FunctionType, str]] = {}

    def of(self, found: Any) -> str:
        """Raises NotKeptError: only its number tells it apart."""
        if isinstance(found, _PLAIN):
            return repr(found)
        if isinstance(found, type):
            return f"class {found.__module__}.{found.__qualname__} {self._of_class(found)}"
        if isinstance(found, types.FunctionType):
            return f"function {found.__module__}.{found.__qualname__} {self.of_function(found)}"
        if isinstance(found, types.CodeType):
            return f"code {self._of_code(found)}"
        if isinstance(found, types.ModuleType):
            return f"module {found.__name__}"
        if isinstance(found, types.BuiltinFunctionType) and _is_of_module(found.__self__):
            return f"builtin {found.__module__}.{found.__qualname__}"
        if isinstance(found, _OPERATORS):
            return f"operator {found}"
        raise NotKeptError(f"a {type(found).__qualname__} is known by its number alone")

    def of_function(self, function: types.FunctionType) -> str:
        """Its code, its defaults and what is in its closure, as far as those are code or plain values."""
        known = self._of_functions.get(id(function))
        if known is not None:
            return known[1]
        self._of_functions[id(function)] = (function, "itself")  # it may be in its own closure
        parts = [self._of_code(function.__code__)]
        parts += [self._loosely(value) for value in function.__defaults__ or ()]
        parts += [f"{name}={self._loosely(value)}" for name, value in (function.__kwdefaults__ or {}).items()]
        parts += [self._loosely(cell.cell_contents) for cell in function.__closure__ or () if _is_full(cell)]
        found = digest(" ".join(parts).encode())
        self._of_functions[id(function)] = (function, found)
        return found

    def _of_code(self, code: types.CodeType) -> str:
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self._of_code(part)
        found = of_code(code)
        self.codes.add(found)
        return found

    def _of_class(self, found: type) -> str:
        return digest(" ".join(self._of_own(each) for each in found.__mro__).encode())

    def _of_own(self, found: type) -> str:
        """What a class adds to its bases; nothing where it is not written in Python."""
        if not found.__flags__ & _WRITTEN_IN_PYTHON:
            return found.__qualname__
        if found not in self._of_classes:
            self._of_classes[found] = "itself"
            parts = [f"{name}={self._loosely(value)}" for name, value in vars(found).items()]
            self._of_classes[found] = digest(" ".join([found.__qualname__, *parts]).encode())
        return self._of_classes[found]

    def _loosely(self, value: Any) -> str:
        """As `of`, but of objects the class's name alone: a guard reads what a trace has read of them."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            return " ".join(map(self._loosely, (value.fget, value.fset, value.fdel)))
        if isinstance(value, types.FunctionType):
            return self.of_function(value)
        if isinstance(value, types.CodeType):
            return self._of_code(value)
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (type, types.ModuleType)):
            return f"{type(value).__name__} {value.__name__}"
        return type(value).__qualname__


_WRITTEN_IN_PYTHON = 1 << 9
"""Py_TPFLAGS_HEAPTYPE."""


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_of_module(bound: Any) -> bool:
    """Whether a builtin is a function of a module (pybind's are bound to a record of theirs), not a method of
    some object."""
    return isinstance(bound, _OF_MODULES) or type(bound).__name__.startswith(("pybind11", "PyCapsule"))
