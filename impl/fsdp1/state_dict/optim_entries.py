"""The states of an optimizer's state dict one by one, wherever they are.

Where only rank 0 has them, the others are told what there is, and each tensor is broadcast when it is asked
for. Whoever asks cuts out its part immediately, so no other rank ever holds more than one whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .sharded_values import is_sharded


@dataclass(frozen=True)
class LoadFrom:
    """Where the values are.

    Attributes:
        sharded: they may be ``ShardedTensor`` or ``DTensor``.
        rank0: only rank 0 of ``group`` has them.
        group: the ranks that load together; ``None`` for all.
        compare: whether ranks tell each other what they load, which is a collective.
    """

    sharded: bool = False
    rank0: bool = False
    group: ProcessGroup | None = None
    compare: bool = True


@dataclass(frozen=True)
class Outline:
    """Stands for a tensor that rank 0 has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def entries_of(
    optim_state_dict: Mapping[str, Any], source: LoadFrom, device: torch.device
) -> tuple[Mapping[str, Any], Iterator[tuple[str, str, Any]]]:
    """The dict (with stand-ins for tensors that others have), and its states one by one.

    Raises:
        ValueError: no state dict of an optimizer; on all ranks alike.
    """
    mine = dist.get_rank(source.group) == 0 if source.rank0 else True
    problem = _problem(optim_state_dict, source) if mine else None
    if not source.rank0:
        if problem is not None:
            raise ValueError(problem)
        return optim_state_dict, _states(optim_state_dict)
    outline = _outline(dict(optim_state_dict)) if mine and problem is None else None
    told: list[Any] = [problem, outline]
    first = dist.get_global_rank(source.group, 0) if source.group is not None else 0
    dist.broadcast_object_list(told, src=first, group=source.group)
    problem, shared = told
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
    # Some values are gathered one by one: all ranks go by the names, whatever order their dicts have.
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
