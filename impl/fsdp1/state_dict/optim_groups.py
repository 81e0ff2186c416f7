"""The parameter groups of an optimizer's state: saved by names, loaded into the optimizer's own groups."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...shared.names import plain_name
from .optim_parameters import Key, TrainedModel


def named_group(
    known: TrainedModel, keys: Mapping[Key, nn.Parameter], group: Mapping[str, Any]
) -> dict[str, Any]:
    """A group of an optimizer's state dict with the names of the originals instead of keys."""
    names = [name for key in group["params"] for name in known.names_of(key, keys[key])]
    rest = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    return {**copy.deepcopy(rest), "params": names}


def loaded_groups(
    known: TrainedModel,
    saved: Sequence[Mapping[str, Any]],
    keys: Mapping[Key, nn.Parameter],
    groups: Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]]:
    """The saved groups' settings for the optimizer's own groups, which say who is in them.

    ``Optimizer.load_state_dict`` goes by position only, so the order must be the optimizer's.
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
    result: list[dict[str, Any]] = []
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
    """The one group of the state dict that has the originals behind these parameters."""
    names = [name for key, parameter in own for name in known.names_of(key, parameter)]
    found = {saved_in[name]: name for name in names if name in saved_in}
    if not found:
        raise ValueError(f"no group of the state dict has the parameters {names[:5]}")
    if len(found) > 1:
        examples = " and ".join(f"'{name}' (group {number})" for number, name in found.items())
        raise ValueError(
            f"parameters of one group of the optimizer are in several groups of the state dict: {examples}; "
            "make the optimizer with the same groups"
        )
    return next(iter(found))


def _settings(
    group: Mapping[str, Any], params: Sequence[Key], param_names: Sequence[str] | None
) -> dict[str, Any]:
    rest = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    named = {} if param_names is None else {"param_names": list(param_names)}
    return {**copy.deepcopy(rest), **named, "params": list(params)}
