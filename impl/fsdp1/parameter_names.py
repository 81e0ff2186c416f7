"""The names that a unit's parameters have in state dicts: those of the plain model.

Wrapping puts parts into the names of modules (the FSDP wrapper, and activation checkpointing's); state dicts
do not show them. A tied parameter has several names, of which the first is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..runtime.hooks import stage_of
from ..runtime.presentation import FLAT_NAME, INSERTED, plain_name
from ..runtime.unit import Unit
from .flat_param import FlatPresentation
from .original_params import OriginalPresentation


def plain_text(text: str) -> str:
    """Return a message with plain names in it."""
    for part in INSERTED:
        text = text.replace(f"{part}.", "")
    return text


def names_in_wrapper(wrapper: nn.Module, unit: Unit) -> list[tuple[str, ...]]:
    """Return all names of each of the unit's parameters, seen from its wrapper, in the order of the unit."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in wrapper.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(plain_name(f"{name}.") if name else "")
    found: list[tuple[str, ...]] = []
    for parameter in unit.parameters:
        keys = [prefix + place.name for place in parameter.places for prefix in names.get(place.module, ())]
        found.append(tuple(dict.fromkeys(keys)))
    return found


@dataclass(frozen=True)
class NamedUnit:
    """A unit of a model with the names of its parameters in that model.

    Attributes:
        wrapper: the module it belongs to.
        prefix: the wrapper's own name in the model with a dot at its end, or nothing.
        names: of each parameter, all of its names.
    """

    unit: Unit
    wrapper: nn.Module
    prefix: str
    names: Sequence[tuple[str, ...]]

    @property
    def title(self) -> str:
        """Return what to call the unit in messages."""
        return f"unit '{plain_name(self.prefix).rstrip('.') or 'root'}'"

    @property
    def is_flat(self) -> bool:
        """Return whether an optimizer sees one flat parameter, not the originals."""
        return isinstance(self.unit.presentation, FlatPresentation)

    @property
    def flat_name(self) -> str:
        """Return the name of the flat parameter in state dicts."""
        return self.prefix + FLAT_NAME


def named_unit(unit: Unit, wrapper: nn.Module, prefix: str) -> NamedUnit:
    """Return ``unit`` of ``wrapper``, whose own name is ``prefix``."""
    names = [tuple(prefix + name for name in each) for each in names_in_wrapper(wrapper, unit)]
    return NamedUnit(unit, wrapper, prefix, names)


def named_units(model: nn.Module) -> list[NamedUnit]:
    """Return all units of ``FullyShardedDataParallel`` below ``model`` with their names, in order.

    Those of ``fully_shard`` are left out: their ``DTensor``s need no help.
    """
    found: list[NamedUnit] = []
    for module_name, module in model.named_modules():
        stage = stage_of(module)
        prefix = plain_name(f"{module_name}.") if module_name else ""
        units = stage.units if stage is not None else ()
        found += [named_unit(unit, module, prefix) for unit in units if has_flat_shards(unit)]
    return found


def has_flat_shards(unit: Unit) -> bool:
    """Return whether ``unit`` belongs to a ``FullyShardedDataParallel``."""
    return isinstance(unit.presentation, (FlatPresentation, OriginalPresentation))
