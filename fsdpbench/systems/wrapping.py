"""Selection of the modules that become FSDP units. All systems get the same units, to be comparable.

block      each block                          every-K    each K consecutive blocks, as one module
every-K:N+every-L:M    by unit                 root       the whole model only
size:N     bottom-up, at least N parameters
A+B        modules of the classes named A, B, modules of these names (`lm_head`), `block` for the blocks
"""

import functools
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import torch
from torch import nn

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.settings.values import is_mixed, unit_sizes
from fsdpbench.workloads import Workload
from fsdpbench.workloads.blocks import BlockGroup, group_blocks

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
    """Raise `UsageError` if `wrap` names classes or modules that the model lacks, before anything runs."""
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
    """Return all submodules except containers, with their paths."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if module is not model and not isinstance(module, _CONTAINERS)
    ]


def _require(names: Iterable[str], classes: frozenset[str], modules: frozenset[str]) -> None:
    for name in names:
        if name != "block" and name not in classes | modules:
            named = ", ".join(sorted(each for each in modules if "." not in each))
            raise UsageError(error_text("wrapping.no_module", name, ", ".join(sorted(classes)), named))


def _of_names(model: nn.Module, workload: Workload, names: list[str]) -> list[nn.Module]:
    _require(names, *_inner_names(model))
    blocks = workload.block_classes if "block" in names else ()
    return _inner_first(
        module
        for name, module in _inner(model)
        if name in names or type(module).__name__ in names or isinstance(module, blocks)
    )


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Choose units bottom-up: a module is one if it has `least` parameters outside of units below it."""
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
        raise UsageError(error_text("wrapping.too_large", least))
    return units


def _inner_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(reversed(list(modules)))


def materialiser(device: torch.device) -> Callable[[nn.Module], None]:
    """Return a function that materializes a module's own parameters on `device`; shared ones stay shared."""
    # Weak references, so that a flattened unit's whole parameters are freed.
    made: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()

    def materialise_own(module: nn.Module) -> None:
        deferred = dict(module.named_parameters(recurse=False))
        to_empty(module, device, recurse=False)
        for name, parameter in deferred.items():
            shared = made.setdefault(parameter, module.get_parameter(name))
            module.register_parameter(name, shared)
        if device.type != "sim":
            init_module(module)

    return materialise_own


_PLAIN = (torch.Tensor, nn.Parameter)


def materialise(model: nn.Module, device: torch.device, *, with_weights: bool) -> None:
    """Materialize a sharded meta-device model on `device`, and initialize its weights if asked.

    A parameter that several modules share stays shared.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    to_empty(model, device)
    for (first, own), *others in places.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(own))
    if with_weights:
        for module in model.modules():
            init_module(module)


@torch.no_grad()
def init_module(module: nn.Module) -> None:
    """Run a module's own `reset_parameters`, if it has one, as torch's layers and the workloads do."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def to_empty(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Call `module.to_empty`, which allocates all tensors of the module on `device`.

    For a meta tensor, torch runs meta kernels in Python that cost more than everything else about a simulated
    parameter; for plain tensors they are skipped.
    """
    if device.type != "sim":
        module.to_empty(device=device, recurse=recurse)
        return
    module._apply(lambda tensor: _empty_like(tensor, device), recurse=recurse)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `torch.empty_like(tensor, device=device)`, but skip torch's meta kernels for plain tensors."""
    from torch.distributed.tensor import DTensor

    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in _PLAIN or not local.is_contiguous():
        return torch.empty_like(tensor, device=device)
    empty = torch.empty(local.shape, dtype=local.dtype, device=device)
    if local is tensor:
        return empty
    return DTensor.__new__(DTensor, empty, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
