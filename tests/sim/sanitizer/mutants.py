"""Puts a mutated function in place of the original one, in a process that has it loaded already.

The code object of the outermost function around a site is exchanged. So every name that the function was
imported under, every decorator around it and every bound method runs the mutant; no module is loaded anew,
and no file is touched.
"""

from __future__ import annotations

import builtins
import gc
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from mutation_sites import REMOVED, WATCHED, Site, mutated, sites_of, watched

_FSDP2 = "torch.distributed.fsdp._fully_shard"
_FSDP1 = "torch.distributed.fsdp"
MODULES = {
    "impl": (
        "impl.runtime.buffer", "impl.runtime.context", "impl.runtime.gather", "impl.runtime.hooks",
        "impl.runtime.lent", "impl.runtime.reduce_ways", "impl.runtime.reduction", "impl.runtime.schedule",
        "impl.runtime.smaller_group", "impl.runtime.streams", "impl.runtime.tree", "impl.runtime.unit",
        "impl.collectives.comm", "impl.fsdp1.flat_param", "impl.fsdp1.flat_units",
        "impl.fsdp1.fully_sharded_data_parallel", "impl.fsdp1.gradients", "impl.fsdp1.original_params",
        "impl.fsdp1.summon", "impl.fsdp1.unreduced", "impl.fsdp2.dtensor_params", "impl.fsdp2.extended",
        "impl.fsdp2.fsdp_module", "impl.shared.placement",
    ),
    "torch-fsdp2": tuple(
        f"{_FSDP2}.{name}"
        for name in (
            "_fsdp_collectives", "_fsdp_common", "_fsdp_init", "_fsdp_param", "_fsdp_param_group",
            "_fsdp_state", "_fully_shard",
        )
    ),
    "torch-fsdp1": tuple(
        f"{_FSDP1}.{name}"
        for name in (
            "_common_utils", "_exec_order_utils", "_flat_param", "_fsdp_extensions", "_limiter_utils",
            "_optim_utils", "_runtime_utils", "_shard_utils", "_state_dict_utils", "_unshard_param_utils",
            "fully_sharded_data_parallel", "sharded_grad_scaler",
        )
    ),
}  # fmt: skip
"""By whose code it is: the modules that are mutated."""

_reached: dict[str, int] = {}


def load(name: str) -> Any:
    """A module by its name in `MODULES`."""
    return importlib.import_module(f"fsdpbench.{name}" if name.startswith("impl.") else name)


def source_of(name: str) -> Path:
    """A module's file."""
    return Path(load(name).__file__)


def all_sites(owner: str) -> list[tuple[str, Site]]:
    """``(module, site)`` of all that is mutated of an owner's code."""
    found = []
    for name in MODULES[owner]:
        shown = name.replace(".", "/") + ".py"
        found += [(name, site) for site in sites_of(source_of(name), shown)]
    return found


def put_in_place(module: str, site: Site) -> None:
    """Exchange the function's code in this process."""
    setattr(builtins, REMOVED, _removed)
    loaded = load(module)
    _exchange(compile(mutated(source_of(module), site), loaded.__file__, "exec", dont_inherit=True), site)


def watch(sites: Sequence[tuple[str, Site]]) -> None:
    """Let all sites do what they do, and be `seen` when they do it."""
    setattr(builtins, WATCHED, _watched)
    by_module: dict[str, list[tuple[int, Site]]] = {}
    for index, (module, site) in enumerate(sites):
        by_module.setdefault(module, []).append((index, site))
    for module, numbered in by_module.items():
        loaded = load(module)
        tree = watched(source_of(module), numbered)
        code = compile(tree, loaded.__file__, "exec", dont_inherit=True)
        for _, site in numbered:
            _exchange(code, site)


seen: set[int] = set()
"""The numbers of watched sites that the program came to."""


def _watched(index: int, value: Any) -> Any:
    seen.add(index)
    return value


def _exchange(code: CodeType, site: Site) -> None:
    """Give the function around a site its code out of a module's."""
    around = [found for found in _outermost(code) if _encloses(found, site)]
    new = max(around, key=lambda found: found.co_firstlineno)
    gc.unfreeze()  # objects that are frozen are not listed
    olds = [
        each
        for each in gc.get_objects()
        if isinstance(each, FunctionType)
        and each.__code__.co_filename == code.co_filename
        and each.__code__.co_qualname == new.co_qualname
        and each.__code__.co_firstlineno == new.co_firstlineno
    ]
    if not olds:
        raise LookupError(f"{site.file}:{site.line}: no function {new.co_qualname} is loaded")
    for each in olds:
        each.__code__ = new


def reached() -> int:
    """How often what was taken out would have run."""
    return _reached.get("count", 0)


def _removed(kind: str, *values: Any) -> Any:
    _reached["count"] = reached() + 1
    if kind == "event":
        return torch.get_device_module("sim").Event()
    if kind == "receiver":
        return values[0]
    if kind == "[]":
        return []
    if kind == "free":
        values[0].free()
        return values[0]
    return None


def _outermost(code: CodeType) -> Iterator[CodeType]:
    """Functions of a module and of its classes, not those within functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, where a class body has none
                yield constant
            else:
                yield from _outermost(constant)


def _encloses(code: CodeType, site: Site) -> bool:
    inside = site.function == code.co_qualname or site.function.startswith(code.co_qualname + ".")
    return inside and code.co_firstlineno <= site.line
