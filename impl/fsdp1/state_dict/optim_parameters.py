"""Map an optimizer's parameters to the original parameters, by the optimizer's keys and by name.

An optimizer numbers its parameters. A number refers to a flat parameter (all original parameters of a unit),
to this rank's part of one original parameter, or to a parameter that no unit owns. State dicts that outlive a
run use the names of the original parameters.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
from torch.optim.optimizer import StateDict

from ...runtime.hooks import stages_in
from ...runtime.presentation import plain_name
from ...shared import error_text
from ..parameter_names import named_units
from .sharded_values import is_sharded

Key = int | str
# One parameter's state, by the optimizer's names of its values; one parameter group with its settings.
State = dict[str, Any]
Group = dict[str, Any]
OptimInput = list[Group] | Iterable[nn.Parameter]


@dataclass(frozen=True)
class Held:
    """The original parameters behind one parameter of an optimizer.

    Attributes:
        names: names of the original parameters.
        unit: index of their unit, ``None`` if no unit owns them.
        indices: their indices in that unit.
    """

    names: tuple[str, ...]
    unit: int | None = None
    indices: tuple[int, ...] = ()


class TrainedModel:
    """The parameters of ``model`` as an optimizer sees them.

    Attributes:
        units: the units of the model with the names of their parameters.
        held: the original parameters behind each parameter that an optimizer may have.
        places: (unit, index) of each original parameter, by any of its names.
        others: parameters that no unit owns, by any of their names.

    Raises:
        RuntimeError: inside forward or backward.
    """

    def __init__(self, model: nn.Module, call: str) -> None:
        for stage, _ in stages_in(model):
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

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return all names of the parameter with this ``name``."""
        place = self.places.get(name)
        return (name,) if place is None else tuple(self.units[place[0]].names[place[1]])

    def of(self, key: Key, parameter: nn.Parameter) -> Held:
        """Return the original parameters behind an optimizer's parameter.

        Raises:
            ValueError: the parameter is not in the model.
        """
        if parameter not in self.held:
            raise ValueError(error_text("optim_parameters.of", key, tuple(parameter.shape)))
        return self.held[parameter]


def keyed_parameters(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput | None = None,
    *,
    by_name: bool = False,
) -> dict[Key, nn.Parameter]:
    """Return the parameters of an optimizer by the keys of its state dict.

    Args:
        optim_input: the constructor argument of the optimizer, if ``optim`` is None. If both are None,
            ``model.parameters()`` is used.
        by_name: whether the optimizer's keys are names, as in ``torch.distributed.optim._NamedOptimizer``.
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


def goes_by_name(optim_state_dict: StateDict) -> bool:
    """Return whether the keys are names instead of numbers."""
    return any(isinstance(key, str) for key in list(optim_state_dict.get("state", ()))[:1])


def rekey(
    optim_state_dict: StateDict,
    to: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput | None = None,
    optim: torch.optim.Optimizer | None = None,
) -> StateDict:
    """Convert the keys of a full state from numbers to names, or back; see ``OptimStateKeyType``.

    Raises:
        ValueError: keys of both kinds, or a key that the model or optimizer lacks.
    """
    kinds = {type(key) for key in optim_state_dict["state"]}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise ValueError(error_text("optim_parameters.rekey", list(optim_state_dict["state"])))
    wanted = str if to is OptimStateKeyType.PARAM_NAME else int
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
        keys = sorted(map(translate, group["params"]), key=lambda key: (type(key).__name__, key))
        groups.append({**rest, "params": keys})
    return {
        "state": {translate(key): state for key, state in optim_state_dict["state"].items()},
        "param_groups": groups,
    }


def _renaming(to_names: bool, model: nn.Module, keys: dict[Key, nn.Parameter]) -> dict[Key, Key]:
    """Return a table from numbers to names, or from names to numbers."""
    known = TrainedModel(model, "rekey_optim_state_dict()")
    table: dict[Key, Key] = {}
    for number, parameter in keys.items():
        names = known.of(number, parameter).names
        if len(names) != 1:
            raise ValueError(error_text("optim_parameters.renaming", number, list(names)))
        table.update({number: names[0]} if to_names else {names[0]: number})
    return table


# Parameter groups of an optimizer's state: saved with names, loaded into the optimizer's own groups.


def named_group(known: TrainedModel, keys: Mapping[Key, nn.Parameter], group: Mapping[str, Any]) -> Group:
    """Return a group of an optimizer's state dict with names of original parameters instead of keys."""
    names = [name for key in group["params"] for name in known.of(key, keys[key]).names]
    return _settings(group, names, None)


def loaded_groups(
    known: TrainedModel,
    saved: Sequence[Mapping[str, Any]],
    keys: Mapping[Key, nn.Parameter],
    groups: Sequence[Mapping[str, Any]] | None,
) -> list[Group]:
    """Return the saved groups' settings for the optimizer's own ``groups``, which determine the members.

    ``Optimizer.load_state_dict`` matches groups by position, so the result has the optimizer's order.
    """
    key_of = {parameter: key for key, parameter in keys.items()}
    saved_in: dict[str, int] = {
        alias: number
        for number, group in enumerate(saved)
        for name in group["params"]
        for alias in known.aliases(plain_name(name))
    }
    if groups is None:
        members: list[list[Key]] = [[] for _ in saved]
        for key, parameter in keys.items():
            members[_saved_group(known, saved_in, [(key, parameter)])].append(key)
        return [_settings(group, own, None) for group, own in zip(saved, members, strict=True)]
    result: list[Group] = []
    for number, group in enumerate(groups):
        own = [(key_of[parameter], parameter) for parameter in group["params"]]
        if own:
            source = _saved_group(known, saved_in, own)
        elif number < len(saved):
            source = number
        else:
            raise ValueError(f"group {number} of the optimizer is empty and not in the state dict")
        result.append(_settings(saved[source], [key for key, _ in own], group.get("param_names")))
    return result


def _saved_group(
    known: TrainedModel, saved_in: Mapping[str, int], own: Sequence[tuple[Key, nn.Parameter]]
) -> int:
    """Return the index of the saved group that has the original parameters behind ``own``."""
    names = [name for key, parameter in own for name in known.of(key, parameter).names]
    found = {saved_in[name]: name for name in names if name in saved_in}
    if not found:
        raise ValueError(f"no group of the state dict has the parameters {names[:5]}")
    if len(found) > 1:
        examples = " and ".join(f"'{name}' (group {number})" for number, name in found.items())
        raise ValueError(error_text("optim_parameters.saved_group", examples))
    return next(iter(found))


def _settings(group: Mapping[str, Any], params: Sequence[Key], param_names: Sequence[str] | None) -> Group:
    """Return a group with ``params`` and the settings of ``group``."""
    rest = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    named = {} if param_names is None else {"param_names": list(param_names)}
    return {**copy.deepcopy(rest), **named, "params": list(params)}


# Iterate over the states of an optimizer's state dict, on this rank or on rank 0.
#
# If only rank 0 has the values, it broadcasts an outline first, and then each tensor when the iterator
# reaches it. The caller cuts out its part immediately, so other ranks never hold more than one full tensor.


@dataclass(frozen=True)
class LoadFrom:
    """The source of the values to load.

    Attributes:
        sharded: whether values may be ``ShardedTensor`` or ``DTensor``.
        rank0: whether only rank 0 of ``group`` has the values.
        group: the ranks that load together; ``None`` for all ranks.
        compare: whether ranks check that they load the same, which is a collective.
    """

    sharded: bool = False
    rank0: bool = False
    group: ProcessGroup | None = None
    compare: bool = True


@dataclass(frozen=True)
class Outline:
    """A placeholder for a tensor on rank 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def entries_of(
    optim_state_dict: Mapping[str, Any], source: LoadFrom, device: torch.device
) -> tuple[Mapping[str, Any], Iterator[tuple[str, str, Any]]]:
    """Return the dict (with placeholders for tensors on rank 0), and an iterator over its states.

    Raises:
        ValueError: not a state dict of an optimizer. All ranks raise.
    """
    mine = dist.get_rank(source.group) == 0 if source.rank0 else True
    problem = _problem(optim_state_dict, source) if mine else None
    if not source.rank0:
        if problem is not None:
            raise ValueError(problem)
        return optim_state_dict, _states(optim_state_dict)
    outline = _outline(dict(optim_state_dict)) if mine and problem is None else None
    shared_by_first: list[Any] = [problem, outline]
    first = dist.get_global_rank(source.group, 0) if source.group is not None else 0
    dist.broadcast_object_list(shared_by_first, src=first, group=source.group)
    problem, shared = shared_by_first
    if problem is not None:
        raise ValueError(f"rank 0: {problem}")
    values = optim_state_dict["state"] if mine else None
    return shared, _broadcast(shared, values, first, source.group, device)


def _problem(optim_state_dict: Mapping[str, Any], source: LoadFrom) -> str | None:
    if "state" not in optim_state_dict:
        return f"an optimizer state dict has the key 'state'; this one has {list(optim_state_dict)}"
    if source.rank0 and any(is_sharded(value) for *_, value in _states(optim_state_dict)):
        return "rank0_only is for whole tensors, but this state dict has sharded ones"
    return None


def _states(optim_state_dict: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    # Some values are gathered one by one, so all ranks iterate in the order of names, not of their dicts.
    for owner, state in sorted(optim_state_dict["state"].items(), key=lambda item: str(item[0])):
        if isinstance(owner, str) and isinstance(state, dict):
            for name, value in state.items():
                yield owner, name, value


def _broadcast(
    outline: Mapping[str, Any],
    values: Mapping[Any, Any] | None,
    first: int,
    group: ProcessGroup | None,
    device: torch.device,
) -> Iterator[tuple[str, str, Any]]:
    for owner, name, value in _states(outline):
        if isinstance(value, Outline):
            if values is not None:
                tensor = values[owner][name].detach().to(device).contiguous()
            else:
                tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
            dist.broadcast(tensor, src=first, group=group)
            yield owner, name, tensor
        else:
            yield owner, name, value


def _outline(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _outline(own) for name, own in value.items()}
    if isinstance(value, torch.Tensor):
        return Outline(tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu()
    return value
