"""Triton in a script: kernels are defined as usual; a launch is an operator of the simulated device.

The operator (`fsdpbench/sim/torch_device/operators/kernels.py`) is the same with and without Triton
installed, and in eager and compiled code: Dynamo traces through the launch in this file. If Triton is
missing, a substitute has enough of it for scripts and libraries that define kernels at import.
"""

import importlib
import importlib.machinery
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from fsdpbench.base.torch_internals import INTERNALS, has_triton_package, patch, replace
from fsdpbench.script.interposing import around_imports

_NAME = "triton"
_COMPILER = INTERNALS["inductor_config"].path.rpartition(".")[0]
"""The package whose modules look for Triton."""


def map_triton() -> None:
    """Make kernels launch on the simulated device, and provide a substitute if Triton is not installed."""
    # torch looks for Triton once and keeps the answer; it must not take the substitute for the real one.
    replace(torch.library, wrap_triton=lambda kernel: kernel)  # it looks for Triton's types
    patch("has_triton", lambda original: lambda: False)  # Dynamo traces a launch instead of Triton's types
    if has_triton_package():
        _launch_on_the_device()
    else:
        sys.meta_path.append(_Finder())
        # Import the compiler's modules without the substitute, whatever imports them first: a script may
        # reset the compiler, or change its settings, before it compiles anything.
        names = re.compile(rf"{re.escape(_COMPILER)}(?:\..*)?")
        around_imports(names, lambda execute, module: without_stand_in()(execute)(module))


class Launcher:
    """The launcher `kernel[grid]`, called with the kernel's arguments."""

    def __init__(self, name: str, parameters: Sequence[str]) -> None:
        self.name = name
        self.parameters = parameters

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        names, tensors, numbered, numbers = [], [], [], []
        for name, value in [*zip(self.parameters, args, strict=False), *kwargs.items()]:
            if isinstance(value, torch.Tensor):
                names.append(name)
                tensors.append(value)
            elif isinstance(value, (bool, int, float)):
                numbered.append(name)
                numbers.append(value)
        torch.ops.fsdpbench.launch(self.name, names, tensors, numbered, numbers)


class _Kernel:
    """A function that Triton would compile."""

    def __init__(self, function: Any) -> None:
        self.fn = function
        self.__name__ = function.__name__
        self.arg_names = list(inspect.signature(function).parameters)

    def __getitem__(self, grid: Any) -> Launcher:
        return Launcher(self.__name__, self.arg_names)

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        Launcher(self.__name__, self.arg_names)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


def _launched_by(kernel: Any, grid: Any) -> Launcher:
    """Return the launcher of a real kernel, inside wrappers that tune it or choose its constants."""
    while not hasattr(kernel, "arg_names") or not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return Launcher(kernel.__name__, kernel.arg_names)


def _run_real(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
    if not warmup:
        _launched_by(kernel, grid)(*args, **kwargs)


def _launch_on_the_device() -> None:
    """Make the installed Triton launch on the simulated device."""
    runtime = importlib.import_module(f"{_NAME}.runtime")
    for kind in (runtime.JITFunction, runtime.Autotuner, runtime.Heuristics):
        replace(kind, __getitem__=_launched_by, run=_run_real)
    runtime.driver.set_active(_Driver())


class _Driver:
    """The part of Triton's driver that is used before a kernel is compiled."""

    def __init__(self) -> None:
        found = torch.cuda.get_device_properties()
        properties = {"multiprocessor_count": found.multi_processor_count, "max_shared_mem": 228 << 10}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)
        self.get_current_target = lambda: SimpleNamespace(
            backend="cuda", arch=found.major * 10 + found.minor, warp_size=32
        )
        self.get_benchmarker = lambda: None
        self.get_current_device = torch.cuda.current_device
        self.get_active_torch_device = lambda: torch.device("cuda", torch.cuda.current_device())


@contextmanager
def without_stand_in() -> Iterator[None]:
    """Hide the substitute for Triton inside: torch's compiler looks for the real one when imported."""
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


class _Anything:
    """Substitute for anything in Triton: a type, a constant, a decorator, a call that makes one of these."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __getitem__(self, index: Any) -> "_Anything":
        return self

    __iter__ = None  # else iteration would call `__getitem__`, without an end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType):
            return _Kernel(args[0])
        if len(args) == 1 and not kwargs and isinstance(args[0], _Kernel):
            return args[0]
        return self


_KNOWN: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("JITFunction", "Autotuner", "Heuristics"), _Kernel),
    "cdiv": lambda x, y: -(-x // y),
    "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
}
"""Triton's types of kernels, which libraries look for, and its functions that run on the host."""


class _Module(ModuleType):
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _KNOWN.get(name) or _Anything(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds Triton, and every submodule that is imported."""

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
