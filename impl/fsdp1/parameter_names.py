"""The names of a unit's parameters in state dicts, equal to those of the unwrapped model.

Wrappers (FSDP's and activation checkpointing's) insert parts into the names of modules. State dicts omit
these parts. A tied parameter has several names; the first is its main name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..runtime.hooks import stages_in
from ..runtime.presentation import FLAT_NAME, INSERTED, plain_name
from ..runtime.unit import Unit
from .flat_param import FlatPresentation
from .original_params import OriginalPresentation


def plain_text(text: str) -> str:
    """Return a message with the inserted parts removed from its names."""
    for part in INSERTED:
        text = text.replace(f"{part}.", "")
    return text


@dataclass(frozen=True)
class NamedUnit:
    """A unit of a model with the names of its parameters in that model.

    Attributes:
        wrapper: the wrapper of the unit.
        prefix: the FQN of the wrapper with a trailing dot, or an empty string for the root.
        names: for each parameter, all of its names.
    """

    unit: Unit
    wrapper: nn.Module
    prefix: str
    names: Sequence[tuple[str, ...]]

    @property
    def title(self) -> str:
        """Return the name of the unit in messages."""
        return f"unit '{plain_name(self.prefix).rstrip('.') or 'root'}'"

    @property
    def is_flat(self) -> bool:
        """Return whether an optimizer sees one flat parameter instead of the original ones."""
        return isinstance(self.unit.presentation, FlatPresentation)

    @property
    def flat_name(self) -> str:
        """Return the name of the flat parameter in state dicts."""
        return self.prefix + FLAT_NAME


def named_unit(unit: Unit, wrapper: nn.Module, prefix: str) -> NamedUnit:
    """Return the ``NamedUnit`` of a ``unit`` of ``wrapper``, which has the name ``prefix``."""
    modules: dict[nn.Module, list[str]] = {}
    for name, module in wrapper.named_modules(remove_duplicate=False):
        modules.setdefault(module, []).append(prefix + (plain_name(f"{name}.") if name else ""))
    names: list[tuple[str, ...]] = []
    for parameter in unit.parameters:
        keys = [name + place.name for place in parameter.places for name in modules.get(place.module, ())]
        names.append(tuple(dict.fromkeys(keys)))
    return NamedUnit(unit, wrapper, prefix, names)


def named_units(model: nn.Module) -> list[NamedUnit]:
    """Return all units of ``FullyShardedDataParallel`` in ``model`` with their names, in order.

    Units of ``fully_shard`` are left out, because their ``DTensor``s need no conversion.
    """
    found: list[NamedUnit] = []
    for stage, name in stages_in(model):
        prefix = plain_name(f"{name}.") if name else ""
        units = filter(has_flat_shards, stage.units)
        found += [named_unit(unit, stage.modules[0], prefix) for unit in units]
    return found


def has_flat_shards(unit: Unit) -> bool:
    """Return whether ``unit`` belongs to a ``FullyShardedDataParallel``."""
    return isinstance(unit.presentation, (FlatPresentation, OriginalPresentation))
