"""What a tensor is to the training: a parameter, a gradient or an optimizer's state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from fsdpbench.sim.tensors.wrapped import with_memory


class Roles:
    """Knows the optimizers that have made a step."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer makes a step."""
        self._optimizers.add(optimizer)

    def of(self, tensor: torch.Tensor) -> str | None:
        """The role of a tensor's memory, with the shape of the parameter that it belongs to."""
        wanted = tensor.untyped_storage().data_ptr()
        if not wanted:
            return None
        for optimizer in self._optimizers:
            for parameter, name, value in _tensors(optimizer):
                if value.device == tensor.device and value.untyped_storage().data_ptr() == wanted:
                    return f"{name} ({' x '.join(map(str, parameter.shape)) or 'scalar'})"
        return None


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            named = [("parameter", parameter), ("gradient", parameter.grad)]
            named += [
                (f"optimizer state {name}", each) for name, each in optimizer.state.get(parameter, {}).items()
            ]
            for name, value in named:
                if isinstance(value, torch.Tensor):
                    for part in with_memory(value):
                        yield parameter, name, part
