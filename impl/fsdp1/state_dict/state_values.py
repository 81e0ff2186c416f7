"""The values of a unit's parameters in each kind of state dict: save them, and load them into its shard."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import StateDict

from ...runtime.presentation import plain_name
from ...runtime.unit import Unit
from ...shared import error_text
from ...shared.torch_internals import ShardedTensor
from ..flat_param import FlatPresentation
from ..original_params import OriginalPresentation
from ..parameter_names import NamedUnit
from ..settings import StateDictType
from ..summon import gather_flat, split_full
from .sharded_values import (
    check_agreement,
    fill_shard,
    is_sharded,
    rows_of_shard,
    rows_of_value,
    sharded_tensor,
    sharded_value,
)

# -- save ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def own_copy(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of ``value`` on ``device``."""
    return value.to(device, copy=True)


def device_for(unit: Unit, offload: bool) -> torch.device:
    """Return the device of values of ``unit`` in a state dict."""
    return torch.device("cpu") if offload else unit.device


@torch.no_grad()
def whole_parameters(unit: Unit, *, keep: bool, offload: bool) -> list[torch.Tensor] | None:
    """Return copies of the unit's full parameters; ``None`` unless ``keep``. Collective."""
    gathered = gather_flat(unit, unit.shard)
    if not keep:
        return None
    return [own_copy(value, device_for(unit, offload)) for value in split_full(unit, gathered)]


@torch.no_grad()
def sharded_parameters(unit: Unit, mesh: DeviceMesh | None, *, offload: bool) -> list[Any]:
    """Return the unit's parameters as ``ShardedTensor`` or ``DTensor``. Collective."""
    segments = unit.layout.segments
    rows = rows_of_shard(unit, unit.shard, range(len(segments)))
    return [
        sharded_value(unit, own.to(device_for(unit, offload)), segment.shape, mesh)
        for own, segment in zip(rows, segments, strict=True)
    ]


def placeholders(unit: Unit) -> list[torch.Tensor]:
    """Return tensors with the shapes of the full parameters that take no memory."""
    like = unit.shard
    return [like.new_empty(()).expand(segment.shape) for segment in unit.layout.segments]


@torch.no_grad()
def local_value(unit: Unit, *, offload: bool) -> ShardedTensor:
    """Return the flat parameter without padding. It shares memory with the shard, unless offloaded."""
    end = _filled(unit, unit.layout.rank)
    local = unit.shard[:end].detach()
    size = unit.layout.shard_numel
    ranks = range(unit.layout.world_size)
    spans = [(rank * size, rank * size + _filled(unit, rank)) for rank in ranks if _filled(unit, rank)]
    return sharded_tensor(unit, local.to(device_for(unit, offload)), [unit.layout.parameter_numel], spans)


def _filled(unit: Unit, rank: int) -> int:
    """Return the number of elements in the shard of ``rank`` that are not padding."""
    layout = unit.layout
    return min(max(layout.parameter_numel - rank * layout.shard_numel, 0), layout.shard_numel)


# -- load ----------------------------------------------------------------------------------------------------


class LoadedUnit:
    """Loads a state dict into one unit.

    Attributes:
        errors: messages about wrong values, worded like those of ``nn.Module``.
    """

    def __init__(self, named: NamedUnit, kind: StateDictType) -> None:
        self._named = named
        self._unit = named.unit
        self._kind = kind
        self.errors: list[str] = []

    def take(self, state_dict: StateDict) -> None:
        """Write this rank's part of the values into the shard. Collective.

        Ranks may have different names of a tied weight.

        Raises:
            RuntimeError: ranks got different parameters.
        """
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            self._take_local(state_dict)
            return
        unit, segments = self._unit, self._unit.layout.segments
        found: list[str] = []
        whole: list[tuple[int, torch.Tensor]] = []
        rows: dict[int, torch.Tensor] = {}
        for index, names in enumerate(self._named.names):
            given = [name for name in names if name in state_dict]
            found.extend(map(plain_name, given and names[:1]))
            for name in given:
                value = state_dict[name]
                if not self._fits(name, value, segments[index].shape):
                    continue
                if is_sharded(value):
                    try:
                        rows[index] = rows_of_value(unit, value, plain_name(name))
                    except ValueError as error:
                        self.errors.append(str(error))
                else:
                    whole.append((index, value))
        self._agree([*found, *self.errors, *(f"shards of {index}" for index in rows)])
        for index, value in whole:
            unit.layout.segments[index].store(value, unit.shard)
        fill_shard(unit, unit.shard, list(rows), list(rows.values()))

    def _fits(self, name: str, value: Any, shape: tuple[int, ...]) -> bool:
        clean = plain_name(name)
        if not isinstance(value, torch.Tensor) and not is_sharded(value):
            self.errors.append(f"'{clean}' must be a tensor, not a {type(value).__name__}")
        elif is_sharded(value) and self._kind is StateDictType.FULL_STATE_DICT:
            self.errors.append(error_text("state_values.whole", clean, type(value).__name__))
        elif tuple(value.size()) != tuple(shape):
            self.errors.append(_mismatch(clean, tuple(value.size()), tuple(shape)))
        else:
            return True
        return False

    def _take_local(self, state_dict: StateDict) -> None:
        unit, key = self._unit, self._named.flat_name
        clean, value = plain_name(key), state_dict.get(key)
        own = _filled(unit, unit.layout.rank)
        local = None
        if isinstance(value, ShardedTensor):
            shards = value.local_shards()
            held = sum(shard.tensor.numel() for shard in shards)
            if tuple(value.size()) != (unit.layout.parameter_numel,):
                self.errors.append(
                    _mismatch(clean, tuple(value.size()), (unit.layout.parameter_numel,))
                    + "; LOCAL_STATE_DICT is for the same wrapping only"
                )
            elif held != own or len(shards) > 1:
                self.errors.append(error_text("state_values.local", clean, held, own))
            elif shards:
                local = shards[0].tensor
        elif value is not None:
            self.errors.append(f"'{clean}' must be a ShardedTensor, not a {type(value).__name__}")
        self._agree([*([clean] if value is not None else []), *self.errors])
        if local is not None:
            unit.shard[:own].copy_(local)

    def _agree(self, items: list[str]) -> None:
        unit = self._unit
        for group in (unit.groups.shard, unit.groups.replicate):
            check_agreement(group, unit.device, items, f"what to load into {self._named.title}")

    def leave_to_module(self, state_dict: StateDict) -> list[str]:
        """Replace values by the parameters for ``nn.Module`` to load; return missing keys of a flat unit."""
        presentation, missing = self._unit.presentation, list[str]()
        local = self._kind is StateDictType.LOCAL_STATE_DICT
        flat_name = self._named.flat_name
        given = state_dict.pop(flat_name, None) is not None if local else True
        if local and not given:
            missing.append(plain_name(flat_name))
        for index, names in enumerate(self._named.names):
            for name in names:
                if isinstance(presentation, OriginalPresentation):
                    if local or name in state_dict:
                        state_dict[name] = presentation.sharded[index]
                elif state_dict.pop(name, None) is None and not local:
                    missing.append(plain_name(name))
        if isinstance(presentation, FlatPresentation):
            state_dict[flat_name] = presentation.flat_param
        return missing


def _mismatch(name: str, given: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return error_text("state_values.shape", name, given, expected)
