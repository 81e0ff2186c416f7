"""The state of an optimizer under the names of the original parameters, full or sharded.

An optimizer has two kinds of state for a parameter: element-wise tensors (momenta), which have the layout of
the shard and are gathered like it, and other values (steps), which are equal on all ranks. With
``use_orig_params`` a rank has state only for parameters with elements in its shard. So ranks first exchange
outlines of their states: one exchange of small objects for all units. Then each unit's tensors are gathered
like its parameters (full values), or moved by one all-to-all (rows).
"""

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import StateDict

from ...shared import error_text
from ...shared.layout import Segment
from ..parameter_names import NamedUnit
from ..summon import gather_flat, split_full
from .optim_parameters import Key, State, TrainedModel, named_group
from .recursion import states_of
from .sharded_values import rows_of_shard, sharded_value
from .state_values import device_for, own_copy


@dataclass(frozen=True)
class SaveAs:
    """How to save.

    Attributes:
        sharded: whether to save rows instead of full tensors.
        keep: whether this rank gets a result.
        offload: whether to move tensors to the CPU.
    """

    sharded: bool
    keep: bool
    offload: bool


@dataclass(frozen=True)
class Elements:
    """A placeholder for an element-wise tensor."""

    dtype: torch.dtype


@dataclass
class _UnitStates:
    """The states of one unit's parameters: this rank's parts, and the merged outlines of all ranks."""

    named: NamedUnit
    parts: dict[int, State] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    everywhere: dict[int, State] = field(default_factory=dict)

    def split(self, parameter: nn.Parameter, indices: tuple[int, ...], state: State) -> None:
        """Split the state of an optimizer's parameter by original parameters; skip empty parameters."""
        if parameter.numel() == 0:
            return
        for index in indices:
            self.parts[index] = {
                name: self._part(parameter, self.named.unit.layout.segments[index], name, value)
                for name, value in state.items()
            }

    def _part(self, parameter: nn.Parameter, segment: Segment, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if value.shape != parameter.shape:
            shapes = tuple(value.shape), tuple(parameter.shape)
            self.problems.append(error_text("optim_state.shape", name, self.named.title, *shapes))
            return None
        elements = value.detach().reshape(-1)
        return segment.in_shard(elements) if self.named.is_flat else elements

    def outline(self) -> dict[int, State]:
        """Return an outline for other ranks: the names of states, and values that are not element-wise."""
        return {
            index: {name: _outline(value) for name, value in state.items()}
            for index, state in self.parts.items()
        }

    def merge(self, outlines: list[dict[int, State]]) -> None:
        """Merge the outlines of all ranks of the shard group.

        Raises:
            RuntimeError: values that must be equal on all ranks differ.
        """
        for rank, outline in enumerate(outlines):
            for index, state in outline.items():
                known = self.everywhere.setdefault(index, {})
                for name, value in state.items():
                    if not _same(known.setdefault(name, value), value):
                        fqn, other = self.named.names[index][0], known[name]
                        words = error_text("optim_state.ranks_disagree", name, fqn, value, rank, other)
                        raise RuntimeError(words)

    def consolidate(self, how: SaveAs) -> dict[int, State]:
        """Return every parameter's state, full or sharded. Collective over the shard group."""
        result: dict[int, State] = {
            index: {name: _copied(state[name], how.offload) for name in self._names(state)}
            for index, state in self.everywhere.items()
        }
        kinds = {
            (name, v.dtype)
            for s in self.everywhere.values()
            for name, v in s.items()
            if isinstance(v, Elements)
        }
        # Collectives: all ranks use this order, whatever order their dicts have.
        for name, dtype in sorted(kinds, key=str):
            which = [i for i in sorted(self.everywhere) if self.everywhere[i].get(name) == Elements(dtype)]
            for index, value in zip(which, self._gather(name, dtype, which, how), strict=True):
                result[index][name] = value
        return result if how.keep else {}

    def _names(self, state: State) -> Iterable[str]:
        """Return the names in torch's order; for a flat parameter, element-wise states come first."""
        kinds = (Elements, torch.Tensor)
        order = sorted(state, key=lambda name: (*(not isinstance(state[name], kind) for kind in kinds), name))
        return order if self.named.is_flat else state

    def _gather(self, name: str, dtype: torch.dtype, which: list[int], how: SaveAs) -> list[Any]:
        unit = self.named.unit
        flat = torch.zeros(unit.layout.shard_numel, dtype=dtype, device=unit.device)
        for index in which:
            segment = unit.layout.segments[index]
            if segment.shard_numel and name in self.parts.get(index, {}):
                segment.in_shard(flat).copy_(self.parts[index][name])
        if not how.sharded:
            gathered = gather_flat(unit, flat)
            if not how.keep:
                return [None] * len(which)
            whole = split_full(unit, gathered)
            return [own_copy(whole[index], device_for(unit, how.offload)) for index in which]
        states = states_of(self.named.wrapper)
        mesh = states.mesh if states is not None else None
        rows = rows_of_shard(unit, flat, which)
        return [
            sharded_value(unit, own.to(device_for(unit, how.offload)), unit.layout.segments[i].shape, mesh)
            for i, own in zip(which, rows, strict=True)
        ]


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Elements(value.dtype) if value.dim() else value.detach().cpu()
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _copied(value: Any, offload: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return own_copy(value, torch.device("cpu") if offload else value.device)


@torch.no_grad()
def consolidated_state(
    model: nn.Module, optim_state_dict: Mapping[str, Any], keys: Mapping[Key, nn.Parameter], how: SaveAs
) -> StateDict:
    """Return an optimizer's state dict under the names of the original parameters. Collective.

    Args:
        optim_state_dict: the result of the optimizer's own ``state_dict()``.
        keys: the optimizer's parameters by their keys in that dict.

    Returns:
        ``state`` and ``param_groups`` as in ``torch.optim.Optimizer.state_dict``; an empty dict unless
        ``how.keep``.

    Raises:
        ValueError: a parameter is not in the model.
        RuntimeError: states cannot be gathered, or differ between ranks.
    """
    known = TrainedModel(model, "optim_state_dict()")
    given: Mapping[Key, State] = optim_state_dict["state"]
    units = [_UnitStates(named) for named in known.units]
    for key, parameter in keys.items():
        held = known.of(key, parameter)
        if held.unit is not None and given.get(key):
            units[held.unit].split(parameter, held.indices, given[key])
    # All ranks use one order, so that they gather the same tensors: torch's, which depends on the mode.
    order = _tell_each_other(units, [name for key, own in keys.items() for name in known.of(key, own).names])
    whole = [unit.consolidate(how) for unit in units]
    if not how.keep:
        return {}
    state: dict[Key, Any] = {}
    for key, parameter in keys.items():
        held = known.of(key, parameter)
        if held.unit is not None:
            found = [whole[held.unit].get(index) for index in held.indices]
        else:
            found = [{name: _copied(value, how.offload) for name, value in given.get(key, {}).items()}]
        state.update({name: own for name, own in zip(held.names, found, strict=True) if own})
    state = _ordered(state, order, known)
    for key in [key for key in given if key not in keys]:
        warnings.warn(error_text("optim_state.no_parameter", key), stacklevel=3)
        state[key] = given[key]
    result: StateDict = {"state": state}
    if "param_groups" in optim_state_dict:
        result["param_groups"] = [named_group(known, keys, g) for g in optim_state_dict["param_groups"]]
    return result


def _tell_each_other(units: list[_UnitStates], names: list[str]) -> list[str]:
    """Exchange outlines over each shard group in use.

    Returns:
        The ``names`` of the first rank of the group, in its order.

    Raises:
        RuntimeError: states cannot be gathered. All ranks of the group raise.
    """
    groups: dict[ProcessGroup | None, list[_UnitStates]] = {}
    for unit in units:
        groups.setdefault(unit.named.unit.groups.shard, []).append(unit)
    for group, members in groups.items():
        mine = ([(unit.outline(), unit.problems) for unit in members], names)
        theirs = [mine]
        if group is not None:
            theirs = [mine for _ in range(group.size())]
            dist.all_gather_object(theirs, mine, group=group)
        problems = dict.fromkeys(text for rank, _ in theirs for _, texts in rank for text in texts)
        if problems:
            raise RuntimeError("the optimizer's state cannot be gathered:\n" + "\n".join(problems))
        for position, unit in enumerate(members):
            unit.merge([rank[position][0] for rank, _ in theirs])
        names = theirs[0][1]
    return names


def _ordered(state: dict[Key, Any], order: list[str], known: TrainedModel) -> dict[Key, Any]:
    """Return ``state`` in ``order``; with ``use_orig_params``, those of no unit, then by unit and name."""
    if all(named.is_flat for named in known.units):
        return {name: state[name] for name in dict.fromkeys((*order, *state)) if name in state}
    first: dict[int, str] = {}
    units = {str(name): known.places.get(str(name), (-1, 0))[0] for name in state}
    for name in sorted(units):
        first.setdefault(units[name], name)
    names = sorted(units, key=lambda name: (units[name] >= 0, first[units[name]], name))
    return {name: state[name] for name in names}
