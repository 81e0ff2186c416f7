"""What of torch cannot be simulated in a script: refused by name, with the remedy.

Operators whose shapes depend on data, and send and recv, are refused by the simulated device itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.graphs
import torch.cuda.memory  # noqa: F401 - looked up by name

from fsdpbench.sim.torch_device.patches.dynamo import stand_in_for_builtin
from fsdpbench.torch_internals import IN_ITS_PLACE, expect, gone


class NotSimulatedError(NotImplementedError):
    """A script asked for what has no counterpart on the simulated device."""

    def __init__(self, name: str, way_out: str) -> None:
        super().__init__(f"{name} is not simulated: {way_out}")


_EAGER = "leave the graph out; launches of the eager program are what is simulated"
_ONE_DEVICE = "a process has one device here; use DistributedDataParallel or FSDP, one process a GPU"
CUDA_CODE = "code compiled for CUDA has no simulated kernel; use torch's operators"
_ALLOCATOR = "the caching allocator is simulated as it is; leave other allocators and pools out"
_REFUSED: tuple[tuple[str, str], ...] = (
    ("torch.cuda.CUDAGraph", _EAGER),
    ("torch.cuda.graph", _EAGER),
    ("torch.cuda.make_graphed_callables", _EAGER),
    ("torch.nn.DataParallel", _ONE_DEVICE),
    ("torch.cuda.comm.broadcast", _ONE_DEVICE),
    ("torch.cuda.comm.scatter", _ONE_DEVICE),
    ("torch.cuda.comm.gather", _ONE_DEVICE),
    ("torch.cuda.comm.reduce_add", _ONE_DEVICE),
    ("torch.utils.cpp_extension.load", CUDA_CODE),
    ("torch.utils.cpp_extension.load_inline", CUDA_CODE),
    ("torch.cuda.MemPool", _ALLOCATOR),
    ("torch.cuda.memory.CUDAPluggableAllocator", _ALLOCATOR),
    ("torch.cuda.set_per_process_memory_fraction", "use a hardware profile with less memory (--hardware)"),
    ("torch.cuda.caching_allocator_alloc", _ALLOCATOR),
)


def refuse_what_cannot_be_simulated(replacements: Replacements) -> None:
    """Replace what is listed above by something that says so when it is called."""
    for name, way_out in _REFUSED:
        found = _find(name)
        refusal = _refused_class if isinstance(found, type) else _refusal
        replacements.add(found, refusal(name, way_out))


def _find(name: str) -> Any:
    """The object of a dotted name of torch. Raises `TorchInternalError` in versions that do not have it."""
    import torch.utils.cpp_extension

    found: Any = torch
    for part in name.split(".")[1:]:
        found = expect(found, part)
    return found


def _refusal(name: str, way_out: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulatedError(name, way_out)

    return refuse


def _refused_class(name: str, way_out: str) -> type:
    """Still a class: scripts ask `isinstance(model, nn.DataParallel)`, and annotate `CUDAGraph | None`."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise NotSimulatedError(name, way_out)

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__module__": name.rpartition(".")[0]})


__all__ = ["CUDA_CODE", "NotSimulatedError", "refuse_what_cannot_be_simulated"]


# Functions of torch replaced wherever torch holds them.
# `from x import f` copies a name: replacing `x.f` alone would leave the copy. All that is to be replaced is
# collected first, then one walk through torch's modules replaces every name for it.


class Replacements:
    """What is to be replaced by what."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def add(self, original: Any, replacement: Any) -> None:
        """`replacement` instead of `original`, in every module of torch."""
        self._by_id[id(original)] = (original, replacement)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """`wrapper(f)` instead of the function f that `owner` has under `name`. Raises `TorchInternalError`
        if it has none."""
        original = expect(owner, name)
        self.add(original, wrapper(original))

    def apply(self, also: tuple[str, ...] = ()) -> None:
        """Replace all that was added, also in this project's FSDP, which may be imported already, and in the
        modules whose names begin with one of `also`. Raises `TorchInternalError` for what no module of torch
        holds: its replacement would not be called."""
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
