"""`import triton` where it is not installed: kernels may be defined, and are refused when they are launched.

Scripts and libraries define Triton kernels beside what they use, at import. On a laptop there is no Triton,
and none would run without a GPU; most of these definitions are never called.

    @triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["n"])
    @triton.jit                                        remembered by name
    def fill(x, n: tl.constexpr): ...

    fill[(blocks,)](x, n=4)                            refused: "Triton kernel fill ..."
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch

from fsdpbench.script.cuda.refusals import CUDA_CODE, NotSimulatedError
from fsdpbench.torch_internals import INTERNALS, has_triton_package, replace

_NAME = "triton"
_COMPILER = INTERNALS["inductor_config"].path.rpartition(".")[0]
"""The package whose modules ask for Triton."""


def map_triton() -> None:
    """From now on Triton can be imported, unless the real one can."""
    # torch looks for Triton once and remembers; it must not take this for the real one.
    if not has_triton_package():
        sys.meta_path.append(_Finder())
        replace(torch.library, wrap_triton=_as_it_is)  # it looks for Triton's types
        sys.meta_path.insert(0, _CompilersFinder())


def _as_it_is(kernel: Any) -> Any:
    """`torch.library.wrap_triton`: the kernel, which is refused when it is launched."""
    return kernel


@contextmanager
def without_stand_in() -> Iterator[None]:
    """Inside, Triton is as absent as it is: torch's compiler, when it is imported, asks for the real one."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    modules = {name: module for name, module in sys.modules.items() if isinstance(module, _Module)}
    for finder in finders:
        sys.meta_path.remove(finder)
    for name in modules:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.meta_path.extend(finders)
        sys.modules.update(modules)


class _Kernel:
    """A function that was to be compiled."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: Any) -> _Kernel:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSimulatedError(f"Triton kernel {self.__name__}", CUDA_CODE)


class _Anything:
    """Stands for whatever Triton has: a type, a constant, a decorator, a call that makes one of these."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __getitem__(self, index: Any) -> _Anything:
        return self

    __iter__ = None  # else iteration over it would go by `__getitem__`, without an end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType):
            return _Kernel(args[0].__name__)
        if len(args) == 1 and not kwargs and isinstance(args[0], _Kernel):
            return args[0]
        return self


_KERNEL_TYPES = ("JITFunction", "Autotuner")
"""Triton's types of kernels, which libraries look for."""


class _Module(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _KERNEL_TYPES:
            return _Kernel
        return _Anything(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds Triton and every submodule that is asked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != _NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _CompilersFinder(MetaPathFinder):
    """Has the modules of torch's compiler imported without the stand-in, whoever imports them first: a script
    may reset the compiler, or change its settings, before it compiles anything."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{name}.".startswith(f"{_COMPILER}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None and hasattr(loader, "exec_module"):
            loader.exec_module = _without_stand_in(loader.exec_module)
        return spec


def _without_stand_in(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        with without_stand_in():
            execute(module)

    return exec_module
