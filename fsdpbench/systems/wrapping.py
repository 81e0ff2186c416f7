"""The modules that become FSDP units: equal for every system, so that all are compared on the same units.

block      each block                          every-K    each K consecutive blocks, as one module
every-K:N+every-L:M    by unit                 root       the whole model only
size:N     bottom-up, at least N parameters
A+B        modules of the classes named A, B, modules of these names (`lm_head`), `block` for the blocks
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn

from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings.values import is_mixed, unit_sizes
from fsdpbench.workloads import BlockGroup, Workload, group_blocks

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def select_units(model: nn.Module, workload: Workload, wrap: str) -> list[nn.Module]:
    """Return the modules to wrap, inner before outer, without the root. `every-K` regroups the blocks."""
    if wrap == "root":
        return []
    if wrap == "block":
        return _of_classes(model, workload.block_classes)
    if wrap.startswith("every-"):
        if wrap == "every-1":
            return _of_classes(model, workload.block_classes)
        mixed = is_mixed(wrap)
        group_blocks(
            model, unit_sizes(wrap, workload.stacks()) if mixed else int(wrap.removeprefix("every-"))
        )
        return _of_classes(model, (BlockGroup,))
    if wrap.startswith("size:"):
        return _by_size(model, int(wrap.removeprefix("size:")))
    return _of_names(model, workload, wrap.split("+"))


def _of_classes(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    return _inner_first(module for module in model.modules() if isinstance(module, classes))


def check_names(workload: Workload, wrap: str) -> None:
    """Refuse a `wrap` of classes or modules that the model lacks, before anything runs: `UsageError`."""
    if wrap in ("root", "block") or wrap.startswith(("every-", "size:")):
        return
    _require(wrap.split("+"), *_names_in(workload))


@functools.lru_cache(maxsize=8)
def _names_in(workload: Workload) -> tuple[frozenset[str], frozenset[str]]:
    with torch.device("meta"):
        return _inner_names(workload.build())


def _inner_names(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return class names and paths of the modules that can be units."""
    inner = dict(_inner(model))
    return frozenset(type(module).__name__ for module in inner.values()), frozenset(inner)


def _inner(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules below the model that are called, with their paths."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if module is not model and not isinstance(module, _CONTAINERS)
    ]


def _require(names: Iterable[str], classes: frozenset[str], modules: frozenset[str]) -> None:
    for name in names:
        if name != "block" and name not in classes | modules:
            own = sorted(each for each in modules if "." not in each)
            raise UsageError(
                f"wrap: the model has no module of class {name!r}, nor one of that name. It has "
                f"{', '.join(sorted(classes))}; {', '.join(own)}; `block` means its blocks."
            )


def _of_names(model: nn.Module, workload: Workload, names: list[str]) -> list[nn.Module]:
    _require(names, *_inner_names(model))
    blocks = workload.block_classes if "block" in names else ()
    return _inner_first(
        module
        for name, module in _inner(model)
        if name in names or type(module).__name__ in names or isinstance(module, blocks)
    )


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Choose units bottom-up: a module becomes one once it holds `least` parameters of no unit below it."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        if left < least or module is model or isinstance(module, _CONTAINERS):
            return left
        units.append(module)
        return 0

    visit(model)
    if not units and least > sum(p.numel() for p in model.parameters()):
        raise UsageError(
            f"wrap: no module of the model holds {least} parameters; use a smaller size or `root`"
        )
    return units


def _inner_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(reversed(list(modules)))
