"""Whom an optimizer's parameters stand for: its keys, and the names of the original parameters behind them.

An optimizer numbers its parameters. Behind a number is a flat parameter (all originals of a unit), this
rank's part of one original, or a parameter that no unit holds. State dicts that outlive a run go by the names
of the originals.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from ...runtime.stage import stage_of
from ...shared.names import plain_name
from ..parameter_names import named_units

Key = int | str
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter]


class OptimStateKeyType(Enum):
    """What the keys of an optimizer's state dict are."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class Held:
    """The originals behind one parameter of an optimizer.

    Attributes:
        names: their own names.
        unit: the number of their unit, ``None`` if no unit holds them.
        indices: their positions in that unit.
    """

    names: tuple[str, ...]
    unit: int | None = None
    indices: tuple[int, ...] = ()


class TrainedModel:
    """The parameters of ``model`` as an optimizer sees them.

    Attributes:
        units: its units with the names of their parameters.
        held: what each parameter that an optimizer may hold stands for.
        places: where to find an original by any of its names: unit and index.
        others: parameters that no unit holds, by any of their names.

    Raises:
        RuntimeError: inside forward or backward.
    """

    def __init__(self, model: nn.Module, call: str) -> None:
        for module in model.modules():
            stage = stage_of(module)
            if stage is not None:
                stage.check_idle(call)
        self.units = named_units(model)
        self.held: dict[nn.Parameter, Held] = {}
        self.places: dict[str, tuple[int, int]] = {}
        self.others: dict[str, nn.Parameter] = {}
        for number, named in enumerate(self.units):
            named.unit.reshard()
            for index, names in enumerate(named.names):
                self.places.update(dict.fromkeys(names, (number, index)))
            own = [names[0] for names in named.names]
            trained = named.unit.presentation.trained()
            whole = len(trained) == 1 and named.is_flat
            for index, parameter in enumerate(trained):
                indices = tuple(range(len(own))) if whole else (index,)
                self.held[parameter] = Held(tuple(own[i] for i in indices), number, indices)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if self.held.get(parameter, Held(())).unit is None:
                self.others[plain_name(name)] = parameter
                self.held.setdefault(parameter, Held((plain_name(name),)))

    def names_of(self, key: Key, parameter: nn.Parameter) -> tuple[str, ...]:
        """The names of the originals behind an optimizer's parameter."""
        return self.of(key, parameter).names

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of the parameter that has this one."""
        place = self.places.get(name)
        return (name,) if place is None else tuple(self.units[place[0]].names[place[1]])

    def of(self, key: Key, parameter: nn.Parameter) -> Held:
        """What an optimizer's parameter stands for.

        Raises:
            ValueError: it is not in the model.
        """
        if parameter not in self.held:
            raise ValueError(
                f"the optimizer's parameter {key!r} of shape {tuple(parameter.shape)} is not in the model: "
                "make the optimizer from the wrapped model's parameters()"
            )
        return self.held[parameter]


def keyed_parameters(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput | None = None,
    *,
    by_name: bool = False,
) -> dict[Key, nn.Parameter]:
    """The parameters of an optimizer by the keys of its state dict.

    Args:
        optim_input: what the optimizer was made from, where it is not at hand; without both it is
            ``model.parameters()``.
        by_name: the optimizer's keys are names, as of ``torch.distributed.optim._NamedOptimizer``.
    """
    if optim_input is not None:
        groups: list[Any] = list(optim_input)
    else:
        groups = optim.param_groups if optim is not None else list(model.parameters())
    parameters: list[nn.Parameter] = [
        parameter
        for group in groups
        for parameter in (group["params"] if isinstance(group, dict) else [group])
    ]
    if not by_name:
        return dict(enumerate(parameters))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: parameter for parameter in parameters}


def goes_by_name(optim_state_dict: dict[str, Any]) -> bool:
    """Whether the keys are names rather than numbers."""
    return any(isinstance(key, str) for key in list(optim_state_dict.get("state", ()))[:1])


def rekey(
    optim_state_dict: dict[str, Any],
    to: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """The same whole state under names instead of numbers, or the other way; see ``OptimStateKeyType``.

    Raises:
        ValueError: keys of both kinds, or a key that the model or optimizer does not have.
    """
    kinds = {type(key) for key in optim_state_dict["state"]}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise ValueError(
            "keys of an optimizer state dict are all names or all numbers, not "
            f"{list(optim_state_dict['state'])}"
        )
    wanted = str if getattr(to, "name", None) == OptimStateKeyType.PARAM_NAME.name else int
    if kinds == {wanted}:
        return optim_state_dict
    table = _renaming(wanted is str, model, keyed_parameters(model, optim, optim_input))

    def translate(key: Key) -> Key:
        if key not in table:
            raise ValueError(f"the model's optimizer has no parameter {key!r}; it has {list(table)}")
        return table[key]

    groups = []
    for group in optim_state_dict["param_groups"]:
        rest = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        groups.append({**rest, "params": sorted(map(translate, group["params"]), key=_order)})
    return {
        "state": {translate(key): state for key, state in optim_state_dict["state"].items()},
        "param_groups": groups,
    }


def _order(key: Key) -> tuple[str, Any]:
    return type(key).__name__, key


def _renaming(to_names: bool, model: nn.Module, keys: dict[Key, nn.Parameter]) -> dict[Key, Key]:
    """From numbers to names, or the other way."""
    known = TrainedModel(model, "rekey_optim_state_dict()")
    table: dict[Key, Key] = {}
    for number, parameter in keys.items():
        names = known.names_of(number, parameter)
        if len(names) != 1:
            raise ValueError(
                f"parameter {number} is a flat one for {list(names)}: rekey with the plain model, or wrap "
                "with use_orig_params=True"
            )
        table.update({number: names[0]} if to_names else {names[0]: number})
    return table
