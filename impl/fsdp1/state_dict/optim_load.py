"""Convert optimizer state under the original names to the state that a wrapped model's optimizer loads.

Full tensors need no communication: each rank cuts out its part (see ``optim_parameters.py`` if only rank 0
has them). Rows are moved into the shards by one all-to-all for each unit and state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import StateDict

from ...collectives.agreement import some
from ...runtime.presentation import plain_name
from ...shared import error_text
from ..parameter_names import NamedUnit
from .optim_parameters import Key, LoadFrom, Outline, State, TrainedModel, entries_of, loaded_groups
from .sharded_values import check_agreement, fill_shard, is_sharded, rows_of_value

# -- one unit ------------------------------------------------------------------------------------------------


@dataclass
class _UnitStates:
    """This rank's part of the states of one unit's parameters."""

    named: NamedUnit
    # Names of element-wise states, which have the shape of the parameter. Needed for scalar parameters.
    like_parameters: frozenset[str]
    parts: dict[int, State] = field(default_factory=dict)
    rows: dict[tuple[str, torch.dtype], dict[int, torch.Tensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def take(self, index: int, name: str, value: Any) -> None:
        """Store this rank's part of one parameter's state, or keep rows until ``exchange``."""
        unit, segment = self.named.unit, self.named.unit.layout.segments[index]
        title = f"{self.named.names[index][0]} {name}"
        state = self.parts.setdefault(index, {})
        is_tensor = is_sharded(value) or isinstance(value, torch.Tensor)
        if not is_tensor or (value.dim() == 0 and (segment.shape or name not in self.like_parameters)):
            self.taken.append(title)
            state[name] = value.detach().clone() if is_tensor else value
        elif tuple(value.size()) != segment.shape:
            shapes = tuple(value.size()), segment.shape
            self.problems.append(error_text("optim_load.shape", name, self.named.names[index][0], *shapes))
        elif is_sharded(value):
            try:
                rows = rows_of_value(unit, value, title)
            except ValueError as error:
                self.problems.append(str(error))
                return
            self.taken.append(f"{title} {value.dtype} in shards")
            self.rows.setdefault((name, value.dtype), {})[index] = rows
        else:
            self.taken.append(title)
            state[name] = segment.own_part(value).to(unit.device, copy=True)

    def exchange(self) -> None:
        """Send rows to the ranks whose shards have their elements. Collective if there are any rows."""
        unit = self.named.unit
        # ``_agree`` has compared names and dtypes, so all ranks issue the same calls in this order.
        for (name, dtype), rows in sorted(self.rows.items(), key=str):
            flat = torch.zeros(unit.layout.shard_numel, dtype=dtype, device=unit.device)
            which = sorted(rows)
            fill_shard(unit, flat, which, [rows[index] for index in which])
            for index in which:
                self.parts[index][name] = unit.layout.segments[index].in_shard(flat).clone()

    def flat_state(self) -> State:
        """Return the state of the flat parameter.

        Raises:
            ValueError: the parameters have states of different kinds, or unequal steps.
        """
        unit = self.named.unit
        result: State = {}
        names = dict.fromkeys(name for state in self.parts.values() for name in state)
        for name in names:
            values = {index: state[name] for index, state in self.parts.items() if name in state}
            tensors = [v for v in values.values() if isinstance(v, torch.Tensor) and v.dim()]
            if not tensors:
                result[name] = self._common(name, values)
                continue
            alike = len(tensors) == len(values) == len(self.parts)
            if not alike or len({tensor.dtype for tensor in tensors}) > 1:
                raise ValueError(f"'{name}' of {self.named.title} is not in all parameters, of one dtype")
            flat = torch.zeros(unit.layout.shard_numel, dtype=tensors[0].dtype, device=unit.device)
            for index, value in values.items():
                unit.layout.segments[index].in_shard(flat).copy_(value)
            result[name] = flat
        return result

    def _common(self, name: str, values: Mapping[int, Any]) -> Any:
        """Return the value that all parameters of the unit share. Raises ValueError if they differ."""
        names = self.named.names
        without = [own[0] for index, own in enumerate(names) if index not in values]
        if without:
            raise ValueError(error_text("optim_load.common", name, self.named.title, without))
        first = values[0]
        for index, value in values.items():
            if type(value) is not type(first) or not bool(value == first):
                title, one, two = self.named.title, names[0][0], names[index][0]
                raise ValueError(error_text("optim_load.one_value", name, title, one, first, two, value))
        return first


# -- the whole dict ------------------------------------------------------------------------------------------


@torch.no_grad()
def state_to_load(
    model: nn.Module,
    optim_state_dict: Mapping[str, Any],
    keys: Mapping[Key, nn.Parameter],
    groups: Sequence[Mapping[str, Any]] | None,
    source: LoadFrom,
    existing: Mapping[Any, State] | None = None,
) -> StateDict:
    """Convert a state dict under original names to one that ``model``'s optimizer can load. Collective.

    Args:
        keys: the optimizer's parameters by their keys.
        groups: the optimizer's own groups, if available.
        existing: the optimizer's state by parameter, if it needs state for parameters without elements too.

    Raises:
        ValueError: names that the model lacks, different shapes, states that do not fit a flat parameter, or
            groups that do not match those of the optimizer.
        RuntimeError: ranks got different states.
    """
    known = TrainedModel(model, "optim_state_dict_to_load()")
    device = known.units[0].unit.device if known.units else next(model.parameters()).device
    outline, entries = entries_of(optim_state_dict, source, device)
    like_parameters = _like_parameters(outline)
    units = [_UnitStates(named, like_parameters) for named in known.units]
    others: dict[str, State] = {}
    problems = _misplaced(known, outline)
    for owner, name, value in entries:
        place = known.places.get(plain_name(owner))
        if is_sharded(value) and not source.sharded:
            problems.append(f"'{name}' of {owner} is a {type(value).__name__}: {_WAY_OUT}")
        elif place is not None:
            units[place[0]].take(place[1], name, value)
        elif plain_name(owner) in known.others:
            own = value.detach().clone() if isinstance(value, torch.Tensor) else value
            others.setdefault(plain_name(owner), {})[name] = own
    _agree(units, problems, source)
    for unit in units:
        unit.exchange()
    result: StateDict = {"state": _by_key(known, units, others, keys, existing or {})}
    for name, value in outline["state"].items():
        if not isinstance(value, dict):
            result["state"][name] = value
    if "param_groups" in outline:
        result["param_groups"] = loaded_groups(known, outline["param_groups"], keys, groups)
    return result


_WAY_OUT = "load it inside state_dict_type(model, StateDictType.SHARDED_STATE_DICT)"


def _like_parameters(outline: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of element-wise states: those that are not a scalar for some parameter."""
    return frozenset(
        name
        for state in outline["state"].values()
        if isinstance(state, dict)
        for name, value in state.items()
        if (isinstance(value, (torch.Tensor, Outline)) or is_sharded(value)) and len(value.shape)
    )


def _misplaced(known: TrainedModel, outline: Mapping[str, Any]) -> list[str]:
    own = {*known.places, *known.others}
    names = [
        name
        for name, value in outline["state"].items()
        if isinstance(value, dict) and (not isinstance(name, str) or plain_name(name) not in own)
    ]
    nested = [
        f"the state of {name} should map names to tensors and values, but is nested otherwise"
        for name, value in outline["state"].items()
        if isinstance(name, str)
        and plain_name(name) in own
        and (not isinstance(value, dict) or any(map(_nests_tensors, value.values())))
    ]
    if not names:
        return nested
    hint = "; numbers have to become names first: rekey_optim_state_dict" if isinstance(names[0], int) else ""
    unknown = some([repr(name) for name in names])
    return [f"the state dict has states of {unknown}, which are not parameters of the model{hint}", *nested]


def _nests_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(own, torch.Tensor | Outline) for own in value.values())


def _agree(units: Sequence[_UnitStates], problems: list[str], source: LoadFrom) -> None:
    """Raise problems on all ranks together, before anything is exchanged."""
    problems = [*problems, *(text for unit in units for text in unit.problems)]
    if source.compare:
        members: dict[tuple[ProcessGroup | None, torch.device], list[str]] = {}
        for unit in units:
            own = unit.named.unit
            for group in (own.groups.shard, own.groups.replicate):
                members.setdefault((group, own.device), []).extend(unit.taken)
        for (group, device), taken in members.items():
            check_agreement(group, device, [*taken, *problems], "the optimizer state to load")
    if problems:
        raise ValueError("the optimizer state cannot be loaded:\n" + "\n".join(problems))


def _by_key(
    known: TrainedModel,
    units: Sequence[_UnitStates],
    others: Mapping[str, State],
    keys: Mapping[Key, nn.Parameter],
    existing: Mapping[Any, State],
) -> dict[Any, Any]:
    """Return the states by the optimizer's keys, without parameters that it does not train."""
    state: dict[Any, Any] = {}
    for key, parameter in keys.items():
        held = known.of(key, parameter)
        if held.unit is None:
            own: State = others.get(held.names[0], {})
        elif units[held.unit].named.is_flat:
            own = units[held.unit].flat_state()
        else:
            unit, index = units[held.unit], held.indices[0]
            own = existing.get(parameter, {})
            if unit.named.unit.layout.segments[index].shard_numel:
                own = {
                    # Element-wise states in the shape of the parameter on this rank.
                    name: v.view(parameter.shape) if isinstance(v, torch.Tensor) and v.dim() else v
                    for name, v in unit.parts.get(index, {}).items()
                }
        if own:
            state[key] = dict(own)
    return state
