"""Parts of torch that cannot be simulated in a script, refused by name with the remedy; and replacements.

Operators whose shapes depend on data, and send and recv, are refused by the simulated device itself.
"""

import functools
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.graphs
import torch.cuda.memory  # noqa: F401 - looked up by name

from fsdpbench.base.errors import PicklableError, error_text
from fsdpbench.base.torch_internals import IN_ITS_PLACE, expect, gone
from fsdpbench.script.own_files import in_a_line
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE
from fsdpbench.sim.torch_device.patches.dynamo import stand_in_for_builtin


class NotSimulatedError(PicklableError, NotImplementedError):
    """Raised for a request of a script without a counterpart on the simulated device."""

    def __init__(self, name: str, way_out: str) -> None:
        super().__init__(f"{name} is not simulated: {way_out}")


@functools.cache
def _table() -> Any:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def refuse_what_cannot_be_simulated(replacements: "Replacements") -> None:
    """Replace what `refusals.toml` lists by functions and classes that raise `NotSimulatedError`."""
    for name, way_out in _table()["refused"].items():
        found = _find(name)
        make = _refused_class if isinstance(found, type) else refusal
        replacements.add(found, make(name, way_out))


def _find(name: str) -> Any:
    """Return the object of a dotted name of torch. Raise `TorchInternalError` if this version lacks it."""
    import torch.utils.cpp_extension

    found: Any = torch
    for part in name.split(".")[1:]:
        found = expect(found, part)
    return found


def refusal(name: str, way_out: str) -> Callable[..., Any]:
    """Return a function that raises `NotSimulatedError` when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulatedError(name, way_out)

    return refuse


def _refused_class(name: str, way_out: str) -> type:
    """Return a class that cannot be instantiated. A class, because scripts test `isinstance(model,
    nn.DataParallel)`, and annotate `CUDAGraph | None`."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise NotSimulatedError(name, way_out)

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__module__": name.rpartition(".")[0]})


class Replacements:
    """Functions of torch and their replacements, applied wherever torch holds them.

    `from x import f` copies a name: replacing only `x.f` would leave the copy. So all replacements are
    collected first; then one walk through torch's modules replaces every name that is bound to them.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def add(self, original: Any, replacement: Any) -> None:
        """Replace `original` by `replacement`, in every module of torch."""
        self._by_id[id(original)] = (original, replacement)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace the function f that `owner` has under `name` by `wrapper(f)`. Raise `TorchInternalError` if
        it has none."""
        original = expect(owner, name)
        self.add(original, wrapper(original))

    def apply(self, also: tuple[str, ...] = ()) -> None:
        """Apply all replacements, also in this project's FSDP, which may be imported already, and in the
        modules whose names begin with one of `also`. Raises `TorchInternalError` for a function that no
        module of torch holds, because its replacement would not be called."""
        prefixes = ("torch.", "fsdpbench.impl.", *also)
        met = set()
        for name, module in list(sys.modules.items()):
            if module is None or not f"{name}.".startswith(prefixes):
                continue
            for attribute, value in list(vars(module).items()):
                found = self._by_id.get(id(value))
                if found is not None:
                    setattr(module, attribute, found[1])
                    met.add(id(value))
        for original, _ in (found for key, found in self._by_id.items() if key not in met):
            raise gone(getattr(original, "__qualname__", repr(original)), IN_ITS_PLACE)
        for original, replacement in self._by_id.values():
            stand_in_for_builtin(original, replacement)


_NAME = re.compile(rf"(\b|'){DEVICE_TYPE}(:\d+|')")
_WITHOUT_TRITON = error_text("refusals.no_triton")
_CUDA_PACKAGES = ("flash_attn", "apex", "transformer_engine", "xformers", "bitsandbytes", "cupy")


_OF_TORCH = "in method wrapper_CUDA_"
"""Part of torch's own message about tensors on two devices."""


def name_cuda(error: BaseException) -> None:
    """Make an error of torch's C++ name the device as the script does."""
    error.args = tuple(
        _NAME.sub(r"\1cuda\2", argument) if isinstance(argument, str) else argument for argument in error.args
    )


def explained(error: BaseException) -> str:
    """Return one line: the error, and the remedy if the simulation caused it."""
    line = in_a_line(error)
    hint = _WITHOUT_TRITON if "TritonMissing" in line else _hint(error)
    return f"{line} ({hint})" if hint else line


def _hint(error: BaseException) -> str | None:
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if package in _CUDA_PACKAGES:
            return f"{package} runs code compiled for CUDA, which is not simulated; use torch's operators"
        return None
    for kind, words, hint in _table()["hints"]["rows"]:
        if type(error).__name__ == kind and words in str(error) and _OF_TORCH not in str(error):
            return str(hint)
    return None
