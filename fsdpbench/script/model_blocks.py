"""The repeated blocks and the FSDP units of a script's model."""

import contextlib
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpbench.base.result_sections import RepeatedBlocks

_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


def class_name(module: nn.Module) -> str:
    """Return the name that the script gave a module's class."""
    inner = unwrapped(module)
    name = type(inner).__name__
    return name.removeprefix("FSDP") if isinstance(inner, fsdp.FSDPModule) else name


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model: `modules` of one class, in `path` (`layers`, `model.layers`). `alone`:
    the container has no other modules."""

    path: str
    modules: tuple[nn.Module, ...]
    alone: bool

    def reported(self) -> RepeatedBlocks:
        """Return the entry of `result.json`."""
        return RepeatedBlocks(self.path, class_name(self.modules[0]), len(self.modules))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of checkpointing, FSDP1 and the compiler."""
    for name in _WRAPPERS:
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    return module


def blocks_of(model: nn.Module) -> Blocks | None:
    """Return the largest group of two or more modules of one class in a list, a dictionary or a sequence,
    if it holds more than half of the parameters; None if there is none."""
    best: tuple[int, Blocks] | None = None
    total = _size(model)
    for path, holder in model.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        kinds = Counter(type(child) for child in holder.children())
        kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
        # A sequence of modules without children, such as linear layers, is the inside of a block.
        if (
            count < 2
            or kind is None
            or not any(True for child in holder.children() for _ in child.children())
        ):
            continue
        found = tuple(child for child in holder.children() if type(child) is kind)
        size = sum(map(_size, found))
        if 2 * size > total and (best is None or size > best[0]):
            best = size, Blocks(path, found, len(found) == sum(kinds.values()))
    return None if best is None else best[1]


def stacks_of(model: nn.Module) -> dict[str, int]:
    """Return the number of blocks, by path, of each list in a model that holds only units that are in no
    other unit; empty if these units have at most half of the parameters."""
    held: dict[str, list[nn.Module]] = {}
    inside = {model}
    for name, module in model.named_modules():
        if is_unit(module) and module not in inside:
            inside.update(module.modules())
            held.setdefault(plain_name(name).rpartition(".")[0], []).append(module)
    stacks = {path: each for path, each in held.items() if path and stacked(model, [path]) == (*each,)}
    blocks = [block for each in stacks.values() for block in each]
    has_most = 2 * sum(map(_size, blocks)) > _size(model)
    return {path: len(each) for path, each in stacks.items()} if has_most and len(blocks) > 1 else {}


def stacked(model: nn.Module, paths: Sequence[str]) -> tuple[nn.Module, ...]:
    """Return the children of these lists in a model, or in a part of it; empty if the lists do not exist."""
    for part in model.modules():
        with contextlib.suppress(AttributeError):
            return tuple(block for path in paths for block in part.get_submodule(path).children())
    return ()


def has_units(module: nn.Module) -> bool:
    """Return whether a part of a module is wrapped already: then it is not a block, but contains blocks."""
    return any(is_unit(each) for each in module.modules() if each is not module)


def is_unit(module: Any) -> bool:
    """Return whether one of torch's FSDPs wraps a module."""
    return isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def unwrapped_root() -> nn.Module | None:
    """Return the outermost module around FSDP units that is not a unit itself but has trainable parameters
    outside of units (not only DTensors); None if there is no such module."""
    units = [each for each in _modules() if is_unit(each)]
    if not units:
        return None
    inside = {id(child) for unit in units for child in unit.modules()}
    outer = [each for each in _modules() if id(each) not in inside and not is_unit(each)]
    around = [each for each in outer if any(is_unit(child) for child in each.modules())]
    below = {id(child) for each in around for child in each.modules() if child is not each}
    for each in around:
        if id(each) in below:
            continue
        covered = {id(p) for unit in each.modules() if is_unit(unit) for p in unit.parameters()}
        bare = [p for p in each.parameters() if p.requires_grad and id(p) not in covered]
        if any(not isinstance(parameter, DTensor) for parameter in bare):
            return each
    return None


def bare_parameters(root: nn.Module) -> int:
    """Return the number of trainable elements of `root` that no unit shards."""
    covered = {id(p) for unit in root.modules() if is_unit(unit) for p in unit.parameters()}
    return sum(p.numel() for p in root.parameters() if p.requires_grad and id(p) not in covered)


def parameter_names() -> dict[int, str]:
    """Return the names of all parameters by `id`, seen from the outermost module."""
    return {
        id(parameter): plain_name(name) for each in roots() for name, parameter in each.named_parameters()
    }


def plain_name(path: str) -> str:
    """Return the name of a parameter without the names of wrappers in it."""
    return ".".join(part for part in path.split(".") if part and part not in (*_WRAPPERS, "module"))


def roots() -> list[nn.Module]:
    """Return the outermost modules."""
    every = _modules()
    below = {id(child) for each in every for child in each.children()}
    return [each for each in every if id(each) not in below]


def _modules() -> list[nn.Module]:
    """Return all modules, except those under construction."""
    found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [each for each in found if "_modules" in vars(each)]
