"""A stand-in for `torch._dynamo`: nothing is compiled here, and its import takes a quarter second.

Eager code needs little of it: optimizers break graphs that are not traced, hooks disable a compiler that is
not there. Any other attribute imports the real one, which replaces the stand-in from then on.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch

from fsdpbench.base.torch_internals import INTERNALS, find_builtin, gone, last_part, register_builtin

_NAME = INTERNALS["dynamo"].path
_ATTRIBUTE = last_part("dynamo")
_FOLDER = Path(torch.__file__).parent / _ATTRIBUTE


def stand_in_for_dynamo() -> None:
    """Install the stand-in for `import torch._dynamo`, unless the real one is imported already."""
    if _NAME not in sys.modules:
        stand_in = sys.modules[_NAME] = _StandIn(_NAME)
        setattr(torch, _ATTRIBUTE, stand_in)


def import_config() -> ModuleType:
    """Import the compiler's settings without it; the real one finds them imported, with their values."""
    name = f"{_NAME}.config"
    if name not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(name, [str(_FOLDER)])
        if spec is None or spec.loader is None:
            raise gone(name, INTERNALS["dynamo"].needed_for)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class _Part:
    """The submodule `name` with its `known` attributes. The rest is looked up in the real one."""

    def __init__(self, name: str, **known: Callable[..., Any]) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_real(), self._name), name)


def _clear_lru_cache() -> None:
    """Do nothing: process groups clear rules of the compiler, and none were made."""


def _get_optimize_ddp_mode() -> str:
    """Return the one mode that DDP must know about; the default is another."""
    if import_config().optimize_ddp is True:
        return "ddp_optimizer"
    mode: str = _real().utils.get_optimize_ddp_mode()
    return mode


class _StandIn(ModuleType):
    trace_rules = _Part("trace_rules", clear_lru_cache=_clear_lru_cache)
    utils = _Part("utils", get_optimize_ddp_mode=_get_optimize_ddp_mode)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__file__ = str(_FOLDER / "__init__.py")
        self.config = import_config()

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Do nothing, as the real one where no graph is traced."""

    @staticmethod
    def disable_nested_graph_breaks() -> AbstractContextManager[None]:
        """Do nothing: torch 2.14's device meshes call it."""
        return nullcontext()

    @staticmethod
    def disable(
        fn: Callable[..., Any] | None = None, recursive: bool = True, **about: Any
    ) -> Callable[..., Any]:
        """Return `fn`, or a decorator: without a compiler nothing needs a guard against it."""
        return (lambda found: found) if fn is None else fn

    def __getattr__(self, name: str) -> Any:
        # A search through all modules for one of Python's own names does not need the compiler.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_real(), name)


def use_real_dynamo() -> None:
    """Replace the stand-in by the real one before something compiles; `disable` acts on later functions."""
    _real()


def _real() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
        delattr(torch, _ATTRIBUTE)
    return importlib.import_module(_NAME)


def passing_to(call: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Return a function that wraps another one: its wrapper returns `call(function, *arguments)`.

    The wrapper takes the function's name, docstring and `__wrapped__`, by which torch and Dynamo find it. The
    parameters of `call` behind the function have its own names, so that a script may give them by keyword.
    """

    def wrap(function: Any) -> Callable[..., Any]:
        _require_names(call, function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(function, *args, **kwargs)

        return wrapper

    return wrap


def as_function(found: Any) -> Any:
    """Return a method as a function of its own, as torch has there: Dynamo looks functions up by identity,
    and its table must hold no two equal ones."""
    if not isinstance(found, MethodType):
        return found

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **kwargs)

    return call


def _require_names(call: Callable[..., Any], function: Any) -> None:
    """Raise `TypeError` where a keyword of `function` would miss the parameter of `call` in its place."""
    try:
        theirs = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return  # a builtin, whose parameters have no names here
    mine = list(inspect.signature(call).parameters.values())[1:]
    for one, other in zip(mine, theirs, strict=False):
        if one.kind is not one.POSITIONAL_OR_KEYWORD or other.kind is not other.POSITIONAL_OR_KEYWORD:
            return
        if other.name not in ("self", one.name):
            raise TypeError(f"{call}: {one.name!r} is {other.name!r} of {function}")


def stand_in_for_builtin(original: Any, replacement: Any) -> None:
    """Give `replacement` the meaning of `original` in scripted code."""
    name = find_builtin(original)
    if name is not None:
        register_builtin(replacement, name)
