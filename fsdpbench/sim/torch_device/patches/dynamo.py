"""A stand-in for `torch._dynamo`: nothing is compiled here, and its import takes a quarter second.

Eager code asks little of it: optimizers break graphs that are not traced, hooks keep a compiler away that is
not there. Whatever else is asked imports the real one, which takes its place from then on.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fsdpbench.base.torch_internals import INTERNALS, find_builtin, gone, last_part, register_builtin

_NAME = INTERNALS["dynamo"].path
_ATTRIBUTE = last_part("dynamo")
_FOLDER = Path(torch.__file__).parent / _ATTRIBUTE


def stand_in_for_dynamo() -> None:
    """Put the stand-in where `import torch._dynamo` finds it, unless the real one is there already."""
    if _NAME not in sys.modules:
        stand_in = sys.modules[_NAME] = _StandIn(_NAME)
        setattr(torch, _ATTRIBUTE, stand_in)


def import_config() -> ModuleType:
    """The compiler's settings without the compiler; the real one finds them imported, with their values."""
    name = f"{_NAME}.config"
    if name not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(name, [str(_FOLDER)])
        if spec is None or spec.loader is None:
            raise gone(name, INTERNALS["dynamo"].needed_for)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class _Part:
    """The submodule `name`, of which little is asked: `known`. The rest is looked up in the real one."""

    def __init__(self, name: str, **known: Callable[..., Any]) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_real(), self._name), name)


def _clear_lru_cache() -> None:
    """Process groups have rules forgotten that were made too early; here none were made."""


def _get_optimize_ddp_mode() -> str:
    """DDP asks for one mode that it must know about; by default it is another."""
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
        """What the real one does where no graph is traced."""

    @staticmethod
    def disable_nested_graph_breaks() -> AbstractContextManager[None]:
        """Of torch 2.14, whose device meshes ask for it."""
        return nullcontext()

    @staticmethod
    def disable(
        fn: Callable[..., Any] | None = None, recursive: bool = True, **about: Any
    ) -> Callable[..., Any]:
        """`fn`, or a decorator: what is never compiled needs no guard against it."""
        return _same if fn is None else fn

    def __getattr__(self, name: str) -> Any:
        # Whoever looks through all modules for a name of Python's own is not asking for a compiler.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_real(), name)


def use_real_dynamo() -> None:
    """Something will compile: the real one takes its place. What it makes of functions (`disable`) holds for
    those that are made from now on."""
    _real()


def _same(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _real() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
        delattr(torch, _ATTRIBUTE)
    return importlib.import_module(_NAME)


def stand_in_for_builtin(original: Any, replacement: Any) -> None:
    """In scripted code `replacement` means what `original` meant."""
    name = find_builtin(original)
    if name is not None:
        register_builtin(replacement, name)
