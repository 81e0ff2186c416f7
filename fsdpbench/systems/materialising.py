"""Memory and initial weights for a model that was built on the meta device."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_PLAIN = (torch.Tensor, nn.Parameter)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a sharded meta-device model its memory and its initial weights (a simulated tensor holds none).

    What several modules share stays one parameter.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    to_empty(model, device)
    for (first, own), *others in places.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(own))
    if device.type == "sim":
        return
    for module in model.modules():
        init_module(module)


@torch.no_grad()
def init_module(module: nn.Module) -> None:
    """Run a module's own `reset_parameters`, as torch's layers and the workloads define it."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def to_empty(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """`module.to_empty`: new memory on `device` for all that the module holds.

    For a tensor of the meta device torch goes through rules in Python that cost more than all else of a
    simulated parameter; these are not asked where the answer is plain.
    """
    if device.type != "sim":
        module.to_empty(device=device, recurse=recurse)
        return
    module._apply(lambda tensor: _empty_like(tensor, device), recurse=recurse)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`torch.empty_like(tensor, device=device)`."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) not in _PLAIN or not local.is_contiguous():
        return torch.empty_like(tensor, device=device)
    empty = torch.empty(local.shape, dtype=local.dtype, device=device)
    if local is tensor:
        return empty
    return DTensor.__new__(DTensor, empty, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
