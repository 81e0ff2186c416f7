"""Situations while state dicts of ``FullyShardedDataParallel`` and of its optimizer are saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from flat_programs import Side
from outcomes.flat_calling_rows import batch, nested
from outcomes.flat_wrapping_rows import linear, two
from outcomes.rows import Program, Table, outcome

TABLE = Table()
row = TABLE.row
BOTH = {"modes": (False, True)}
State = dict[str, Any]


def stepped(side: Side, strategy: str = "FULL_SHARD", backwards: bool = False, **arguments: Any) -> Any:
    """An optimizer after a step."""
    model = nested(side, strategy, **arguments)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters[::-1] if backwards else parameters, lr=0.1)
    model(batch(side)).square().sum().backward()
    optimizer.step()
    return optimizer


def typed(side: Side, kind: str, model: Any = None) -> Any:
    return side.api.FullyShardedDataParallel.state_dict_type(
        side.model if model is None else model, side.api.StateDictType[kind]
    )


# -- a damaged optimizer state --


def _first(state: State) -> Any:
    return next(iter(state["state"].values()))


def _wrong_names(state: State) -> None:
    state["state"] = {f"x.{name}": value for name, value in state["state"].items()}


def _nested_once_more(state: State) -> State:
    return {"state": state, "param_groups": state["param_groups"]}


def _in_a_list(state: State) -> None:
    state["state"] = {name: [value] for name, value in state["state"].items()}


def _states_as_state(state: State) -> State:
    return state["state"]


def _value_nested(state: State) -> None:
    for value in state["state"].values():
        value["exp_avg"] = {"value": value["exp_avg"]}


def _one_value_nested(state: State) -> None:
    _first(state)["exp_avg"] = {"value": _first(state)["exp_avg"]}


def _outer_nested(state: State) -> None:
    state["state"] = {"optimizer": state["state"]}


def _swapped(state: State) -> None:
    names = {key for value in state["state"].values() for key in value}
    state["state"] = {
        key: {name: value[key] for name, value in state["state"].items()} for key in sorted(names)
    }


DAMAGES: dict[str, Callable[[State], Any]] = {
    "none": lambda s: None,
    "no_state": lambda s: s.pop("state") and None,
    "no_groups": lambda s: s.pop("param_groups") and None,
    "empty": lambda s: {},
    "not_a_dict": lambda s: [s],
    "is_none": lambda s: None if s.clear() else {"state": None, "param_groups": []},
    "state_is_list": lambda s: s.update(state=list(s["state"].values())),
    "groups_are_one": lambda s: s.update(param_groups=s["param_groups"][0]),
    "groups_empty": lambda s: s.update(param_groups=[]),
    "group_without_params": lambda s: s["param_groups"][0].pop("params") and None,
    "group_params_empty": lambda s: s["param_groups"][0].update(params=[]),
    "group_params_text": lambda s: s["param_groups"][0].update(params="enter.weight"),
    "nested_once_more": _nested_once_more,
    "states_as_state": _states_as_state,
    "in_a_list": _in_a_list,
    "wrong_names": _wrong_names,
    "value_nested": _value_nested,
    "one_value_nested": _one_value_nested,
    "outer_nested": _outer_nested,
    "swapped": _swapped,
    "one_missing": lambda s: s["state"].pop(next(iter(s["state"]))) and None,
    "one_empty": lambda s: _first(s).clear(),
    "one_state_missing": lambda s: _first(s).pop("exp_avg") is None,
    "one_state_more": lambda s: _first(s).update(more=1),
    "other_shape": lambda s: _first(s).update(exp_avg=torch.ones(3)),
    "other_dtype": lambda s: _first(s).update(exp_avg=_first(s)["exp_avg"].double()),
    "is_number": lambda s: _first(s).update(exp_avg=1.0),
    "is_text": lambda s: _first(s).update(exp_avg="x"),
    "value_is_none": lambda s: _first(s).update(exp_avg=None),
    "other_step": lambda s: _first(s).update(step=torch.tensor(9.0)),
    "step_number": lambda s: _first(s).update(step=1),
    "step_tensor_1d": lambda s: _first(s).update(step=torch.ones(1)),
    "numbers_for_names": lambda s: s.update(state=dict(enumerate(s["state"].values()))),
    "one_number_for_a_name": lambda s: s["state"].update({0: s["state"].pop(next(iter(s["state"])))}),
    "extra_name": lambda s: s["state"].update(stranger={"step": torch.tensor(1.0)}),
    "extra_value": lambda s: s["state"].update(stranger=1),
    "extra_key": lambda s: s.update(more=1),
}


def _damaged(damage: Callable[[State], Any], kind: str, load: Any) -> Any:
    def program(side: Side) -> None:
        optimizer = stepped(side)
        fsdp = side.api.FullyShardedDataParallel
        with typed(side, kind):
            state = fsdp.optim_state_dict(side.model, optimizer)
            state = {
                "state": {name: dict(value) for name, value in state["state"].items()},
                "param_groups": copy.deepcopy(state["param_groups"]),
            }
            changed = damage(state)
            state = state if changed is None or changed is False else changed
            load(fsdp, side, optimizer, state)

    return program


def _to_load(fsdp: Any, side: Side, optimizer: Any, state: Any) -> None:
    optimizer.load_state_dict(fsdp.optim_state_dict_to_load(side.model, optimizer, state))
    optimizer.step()


def _shard(fsdp: Any, side: Side, optimizer: Any, state: Any) -> None:
    optimizer.load_state_dict(fsdp.shard_full_optim_state_dict(state, side.model, optim=optimizer))


def _scatter(fsdp: Any, side: Side, optimizer: Any, state: Any) -> None:
    optimizer.load_state_dict(
        fsdp.scatter_full_optim_state_dict(state if side.rank == 0 else None, side.model, optim=optimizer)
    )


def _rekey(fsdp: Any, side: Side, optimizer: Any, state: Any) -> None:
    keys = side.api.fully_sharded_data_parallel if side.kind == "torch" else side.api
    net = type(side.net)()
    plain = torch.optim.Adam(net.parameters(), lr=0.1)
    plain.load_state_dict(
        fsdp.rekey_optim_state_dict(state, keys.OptimStateKeyType.PARAM_ID, net, optim=plain)
    )


LOADS = {
    "full": ("FULL_STATE_DICT", _to_load), "sharded": ("SHARDED_STATE_DICT", _to_load),
    "shard": ("FULL_STATE_DICT", _shard), "rekey": ("FULL_STATE_DICT", _rekey),
}  # fmt: skip
for _load, (_kind, _function) in LOADS.items():
    for _name, _damage in DAMAGES.items():
        _program = {f"{_load}_{_name}": _damaged(_damage, _kind, _function)}
        _quick = _load == "full" and _name in ("in_a_list", "one_state_missing")
        TABLE.family("optimizer_", _program, modes=(False, True), quick=_quick)


# -- saving optimizers --


@row(**BOTH)
def save_optimizer_of_strangers(side: Side) -> None:
    nested(side)
    optimizer = torch.optim.Adam(linear().parameters())
    side.api.FullyShardedDataParallel.optim_state_dict(side.model, optimizer)


@row(**BOTH)
def save_optimizer_of_a_plain_model(side: Side) -> None:
    module = two()
    side.api.FullyShardedDataParallel.optim_state_dict(module, torch.optim.Adam(module.parameters()))


@row(**BOTH)
def save_optimizer_without_state(side: Side) -> int:
    nested(side)
    optimizer = torch.optim.Adam(side.model.parameters())
    return len(side.api.FullyShardedDataParallel.optim_state_dict(side.model, optimizer)["state"])


@row(**BOTH)
def save_optimizer_with_a_stranger(side: Side) -> list[str]:
    optimizer = stepped(side)
    state = optimizer.state_dict()
    state["state"]["mine"] = {"x": 1}
    found = side.api.FullyShardedDataParallel.optim_state_dict(side.model, optimizer, state)
    return sorted(found["state"])[-1:]


KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")


def _in_order(kind: str, differs: bool) -> Program:
    """The order in which the state lists names; optimizers go backwards, on all ranks or on one."""

    def program(side: Side) -> str:
        optimizer = stepped(side, backwards=not differs or side.rank == 0)
        with typed(side, kind):
            state = side.api.FullyShardedDataParallel.optim_state_dict(side.model, optimizer)
        return str((list(state["state"]), [group["params"] for group in state["param_groups"]]))

    return program


for _end, _differs in (("", False), ("_of_each_rank", True)):
    _orders = {f"{kind}{_end}": _in_order(kind, _differs) for kind in KINDS}
    TABLE.family("optimizer_order_", _orders, modes=(False, True), quick=_differs)


# -- state dict types --


@row()
def type_text(side: Side) -> None:
    side.api.FullyShardedDataParallel.set_state_dict_type(nested(side), "full")


@row()
def type_of_a_plain_model(side: Side) -> None:
    side.api.FullyShardedDataParallel.set_state_dict_type(two(), side.api.StateDictType.FULL_STATE_DICT)


@row()
def get_type_of_a_plain_model(side: Side) -> None:
    side.api.FullyShardedDataParallel.get_state_dict_type(two())


@row()
def type_with_other_config(side: Side) -> None:
    side.api.FullyShardedDataParallel.set_state_dict_type(
        nested(side), side.api.StateDictType.FULL_STATE_DICT, side.api.ShardedStateDictConfig()
    )


@row()
def type_with_other_optimizer_config(side: Side) -> None:
    side.api.FullyShardedDataParallel.set_state_dict_type(
        nested(side), side.api.StateDictType.FULL_STATE_DICT, None, side.api.ShardedOptimStateDictConfig()
    )


@row()
def types_mixed(side: Side) -> None:
    model = nested(side)
    side.api.FullyShardedDataParallel.set_state_dict_type(
        side.net.layers[0], side.api.StateDictType.SHARDED_STATE_DICT
    )
    side.api.FullyShardedDataParallel.get_state_dict_type(model)


@row()
def types_mixed_set(side: Side) -> None:
    model = nested(side)
    kinds = side.api.StateDictType
    side.api.FullyShardedDataParallel.set_state_dict_type(side.net.layers[0], kinds.SHARDED_STATE_DICT)
    side.api.FullyShardedDataParallel.set_state_dict_type(model, kinds.FULL_STATE_DICT)


@row()
def types_mixed_saved(side: Side) -> None:
    model = nested(side)
    kinds = side.api.StateDictType
    side.api.FullyShardedDataParallel.set_state_dict_type(side.net.layers[0], kinds.SHARDED_STATE_DICT)
    model.state_dict()


# -- state dicts of models --


def _loaded(change: Callable[[State], Any], kind: str, strict: bool) -> Any:
    def program(side: Side) -> None:
        model = nested(side)
        with typed(side, kind):
            state = dict(model.state_dict())
            change(state)
            model.load_state_dict(state, strict=strict)

    return program


CHANGES: dict[str, Callable[[State], Any]] = {
    "missing": lambda s: s.pop(next(iter(s))),
    "more": lambda s: s.update(stranger=torch.ones(2)),
    "shape": lambda s: s.update({next(iter(s)): torch.ones(3)}),
    "number": lambda s: s.update({next(iter(s)): 1.0}),
    "none": lambda s: s.update({next(iter(s)): None}),
    "list": lambda s: s.update({next(iter(s)): [1.0]}),
    "empty": lambda s: s.clear(),
}
for _kind in KINDS[:2]:
    for _end, _strict in (("strict", True), ("not_strict", False)):
        _loads = {
            f"{name}_{_kind}_{_end}": _loaded(change, _kind, _strict) for name, change in CHANGES.items()
        }
        TABLE.family("load_", _loads, modes=(False, True))


@row(**BOTH)
def load_not_a_dict(side: Side) -> None:
    nested(side).load_state_dict([1])


def _no_shard(kind: str) -> Program:
    def program(side: Side) -> str:
        model = nested(side, "NO_SHARD")
        with typed(side, kind):
            said = [outcome(lambda: model.state_dict() and None)]
            state = model.state_dict()
            said.append(outcome(lambda: model.load_state_dict(state) and None))
        return str(said)

    return program


def _in_summon(kind: str) -> Program:
    def program(side: Side) -> str:
        model = nested(side)
        with side.api.FullyShardedDataParallel.summon_full_params(model), typed(side, kind):
            return outcome(lambda: len(model.state_dict()))

    return program


TABLE.family("no_shard_", {kind: _no_shard(kind) for kind in KINDS}, modes=(False, True))
TABLE.family("in_summon_", {kind: _in_summon(kind) for kind in KINDS}, modes=(False, True))


@row(**BOTH)
def state_dict_in_forward(side: Side) -> None:
    model = nested(side)
    side.net.exit.register_forward_hook(lambda *_: model.state_dict() and None)
    model(batch(side))


@row(**BOTH)
def state_dict_of_a_unit_in_forward(side: Side) -> None:
    model = nested(side)
    unit = side.net.layers[0]
    side.net.exit.register_forward_hook(lambda *_: unit.state_dict() and None)
    model(batch(side))


@row(**BOTH)
def state_dict_between(side: Side) -> None:
    model = nested(side)
    loss = model(batch(side)).sum()
    model.state_dict()
    loss.backward()


@row(**BOTH)
def load_between(side: Side) -> None:
    model = nested(side)
    state = model.state_dict()
    loss = model(batch(side)).sum()
    model.load_state_dict(state)
    loss.backward()
