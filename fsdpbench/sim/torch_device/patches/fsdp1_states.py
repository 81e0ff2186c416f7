"""The optimizer's states of torch's FSDP1 with original parameters: those of other ranks' parameters.

A rank has states of the parameters that its shards hold a part of. To gather them, torch asks all ranks for
the names of theirs, and for dtypes, steps and sizes. Ranks that are not there answer as this one; so a
parameter whose parts are all elsewhere is given the states that another one of its unit has here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.base.torch_internals import patch
from fsdpbench.sim.torch_device.distributed.process_group import SimProcessGroup
from fsdpbench.sim.torch_device.patches.dynamo import passing_to


def install_states_of_other_ranks() -> None:
    """Answer FSDP1's two questions for the ranks that are not there."""
    known = _Known()
    patch("map_param_key_to_optim_keys", passing_to(known.keys_of_all))
    patch("allgather_state_info", passing_to(known.infos_of_all))


class _Known:
    """A state of this rank's optimizer, from which those of other ranks are inferred; holds no tensors."""

    def __init__(self) -> None:
        self._state: dict[str, Callable[[], Any]] = {}

    def keys_of_all(
        self,
        original: Any,
        optim_state_dict: Any,
        group: Any,
        param_key_to_param: Any,
        param_to_fqns: Any,
        fqn_to_fsdp_param_info: Any,
        merge_keys: bool = False,
    ) -> Any:
        """Return the keys of all ranks' states, sorted, and this rank's; `merge_keys`: original parameters.

        Raises `NotImplementedError` if this rank holds no part of a trainable parameter.
        """
        keys, here = original(
            optim_state_dict, group, param_key_to_param, param_to_fqns, fqn_to_fsdp_param_info, merge_keys
        )
        if not merge_keys or not isinstance(group or dist.group.WORLD, SimProcessGroup):
            return keys, here
        states: list[dict[str, Any]] = [optim_state_dict["state"][key] for key in here.values()]
        self._state = {
            name: weakref.ref(value) if isinstance(value, torch.Tensor) else partial(lambda same: same, value)
            for name, value in (states[0] if states else {}).items()
        }
        with_states, without, elsewhere = set[int](), set[int](), list[tuple[str, int]]()
        for key, parameter in param_key_to_param.items():
            name = param_to_fqns[parameter][0]
            unit = id(fqn_to_fsdp_param_info.get(name))
            if name not in fqn_to_fsdp_param_info or not parameter.requires_grad:
                continue
            if key in optim_state_dict["state"]:
                with_states.add(unit)
            elif parameter.numel():
                without.add(unit)
            else:
                elsewhere.append((name, unit))
        # A unit whose parameters have no states here did not run.
        missing = [name for name, unit in elsewhere if unit in with_states or unit not in without]
        if missing and not keys:
            raise NotImplementedError(
                f"the optimizer's states of {missing[0]} are not simulated: this rank's shards hold no "
                "trainable parameter to take them from; use FSDP(use_orig_params=False), fully_shard, or "
                "fewer ranks"
            )
        added = {keys[0]._replace(unflat_param_names=(name,), is_fsdp_managed=True) for name in missing}
        return sorted({*keys, *here, *added}), here

    def infos_of_all(self, original: Any, fsdp_state: Any, input_states: Any) -> Any:
        """Return what each rank of a unit's group reports about `input_states`: another one has all that this
        one has, and for a parameter without states here those of another parameter."""
        infos = original(fsdp_state, input_states)
        if not isinstance(fsdp_state.process_group, SimProcessGroup):
            return infos
        own = infos[fsdp_state.rank]
        like = next((info for info in own.values() if _has_elements(info)), None)
        if like is None and self._state:
            state = {name: value() for name, value in self._state.items()}
            like = next(iter(original(fsdp_state, {"": state})[0].values()))
        others = {name: info if like is None or _has_elements(info) else like for name, info in own.items()}
        return [own if rank == fsdp_state.rank else others for rank in range(len(infos))]


def _has_elements(info: Any) -> bool:
    return any(tensor.shape.numel() for tensor in info.tensors.values())
