"""Stand-in for `torch._dynamo`, whose import takes a quarter second, until something is compiled.

Eager code needs few of its functions: optimizers break graphs (none is traced), hooks disable the compiler
(none is loaded). Any other attribute imports the real module, which then replaces the stand-in.
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
    """Install the stand-in for `import torch._dynamo`, unless the real module is already imported."""
    if _NAME not in sys.modules:
        stand_in = sys.modules[_NAME] = _StandIn(_NAME)
        setattr(torch, _ATTRIBUTE, stand_in)


def import_config() -> ModuleType:
    """Import the compiler's settings without the compiler, which later finds them, with their values."""
    name = f"{_NAME}.config"
    if name not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(name, [str(_FOLDER)])
        if spec is None or spec.loader is None:
            raise gone(name, INTERNALS["dynamo"].needed_for)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class _Part:
    """Submodule `name` with its `known` attributes; others are looked up in the real module."""

    def __init__(self, name: str, **known: Callable[..., Any]) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_real(), self._name), name)


def _clear_lru_cache() -> None:
    """Do nothing: process groups clear the compiler's rules, and there are none."""


def _get_optimize_ddp_mode() -> str:
    """Return the only mode that matters to DDP; the default is another."""
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
        """Do nothing, like the real function if no graph is traced."""

    @staticmethod
    def disable_nested_graph_breaks() -> AbstractContextManager[None]:
        """Do nothing; device meshes of torch 2.14 call it."""
        return nullcontext()

    @staticmethod
    def disable(
        fn: Callable[..., Any] | None = None, recursive: bool = True, **about: Any
    ) -> Callable[..., Any]:
        """Return `fn` or a decorator unchanged: without a compiler there is nothing to disable."""
        return (lambda found: found) if fn is None else fn

    def __getattr__(self, name: str) -> Any:
        # Looking up Python's own names on all modules does not need the compiler.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_real(), name)


def use_real_dynamo() -> None:
    """Replace the stand-in by the real module before a compilation, so that `disable` takes effect."""
    _real()


def _real() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
        delattr(torch, _ATTRIBUTE)
    return importlib.import_module(_NAME)


def passing_to(call: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Return a function that wraps another one; the wrapper returns `call(function, *arguments)`.

    The wrapper has the function's name, docstring and `__wrapped__`, by which torch and Dynamo find it. After
    its first parameter, `call` must name parameters like the function, so that scripts may use keywords.
    """

    def wrap(function: Any) -> Callable[..., Any]:
        _require_names(call, function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(function, *args, **kwargs)

        return wrapper

    return wrap


def as_function(found: Any) -> Any:
    """Return a method as a separate function, as torch has there: Dynamo looks up functions by identity, and
    its table must not hold two equal ones."""
    if not isinstance(found, MethodType):
        return found

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        return found(*args, **kwargs)

    return call


def _require_names(call: Callable[..., Any], function: Any) -> None:
    """Raise `TypeError` if a parameter of `call` has another name than that of `function` in its place."""
    try:
        theirs = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return  # a builtin, whose parameter names are unknown
    mine = list(inspect.signature(call).parameters.values())[1:]
    for one, other in zip(mine, theirs, strict=False):
        if one.kind is not one.POSITIONAL_OR_KEYWORD or other.kind is not other.POSITIONAL_OR_KEYWORD:
            return
        if other.name not in ("self", one.name):
            raise TypeError(f"{call}: {one.name!r} is {other.name!r} of {function}")


def stand_in_for_builtin(original: Any, replacement: Any) -> None:
    """Make scripted code treat `replacement` like `original`."""
    name = find_builtin(original)
    if name is not None:
        register_builtin(replacement, name)
